// Addresses: `#/PAGE?name=value`. They stand behind the hash, so they work behind any proxy and
// prefix, need no support by the server, and are not sent to it.

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path.split("/")[0] || "meshes", params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** The address of a page with parameters; empty ones are left out. */
export function address(page, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString().replaceAll("%3A", ":").replaceAll("%5B", "[").replaceAll("%5D", "]");
  return `#/${page}${query ? `?${query}` : ""}`;
}

/** Change parameters of the present page. Typing replaces the entry, a choice adds one. */
export function change(params, replace = false) {
  const now = route();
  const next = address(now.page, { ...now.params, ...params });
  if (next === location.hash) return;
  if (replace) {
    history.replaceState(null, "", next);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = next;
}
