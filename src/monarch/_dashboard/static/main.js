// The shell: header, the line that says what stops progress, pages by address, keys.

import { h, morph } from "./dom.js";
import { connect, counts, listen, live, now, staleness } from "./state.js";
import { readColours } from "./grid.js";
import { clock, plural, seconds } from "./format.js";
import { address, route } from "./route.js";
import { actorLink, countLinks } from "./parts.js";
import { closeDrawer, updateDrawer } from "./drawer.js";
import * as meshes from "./pages/meshes.js";

// The first page is loaded with the shell; the others when they are asked for.
const PAGES = {
  meshes: ["Meshes", async () => meshes], waits: ["Waits", () => import("./pages/waits.js")],
  failures: ["Failures", () => import("./pages/failures.js")], messages: ["Messages", () => import("./pages/messages.js")],
  processes: ["Processes", () => import("./pages/processes.js")], logs: ["Logs", () => import("./pages/logs.js")],
  sql: ["SQL", () => import("./pages/sql.js")],
};
const at = (id) => document.getElementById(id);
const [head, line, main, tipBox, said] = ["head", "now", "main", "tip", "said"].map(at);

// -- theme ---------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
const theme = () => { try { return localStorage.getItem("theme") ?? "system"; } catch { return "system"; } };
function setTheme(name) {
  try { localStorage.setItem("theme", name); } catch { /* a browser without storage forgets it */ }
  if (name === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  recolour();
}
function recolour() { readColours(); drawHead(); shown?.render?.(); }
if (theme() !== "system") document.documentElement.dataset.theme = theme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

// -- small things for pages ------------------------------------------------------------------------

function tip(content, x = 0, y = 0) {
  tipBox.hidden = !content;
  if (!content) return;
  morph(tipBox, h("b", null, content.name), content.lines.map((text) => h("div", null, text)));
  const { width, height } = tipBox.getBoundingClientRect();
  tipBox.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 8))}px`;
  tipBox.style.top = `${y + 16 + height > innerHeight ? Math.max(6, y - height - 12) : y + 16}px`;
}
const say = (text) => { said.textContent = text; };

// -- header and the line below ---------------------------------------------------------------------

const LINKS = { live: "Live", wait: "Connecting", stale: "Script is silent", lost: "Disconnected", refused: "No access" };

function drawHead() {
  const { page } = route();
  const about = live.about;
  const troubles = (live.failures?.groups.length ?? 0) + (live.failures?.silent.length ?? 0) + (live.failures?.lost_hosts.length ?? 0);
  const rest = { live: "", wait: "", refused: "" }[live.link] ?? `, ${seconds(staleness())} old`;
  morph(head,
    h("a", { class: "brand", href: "#/meshes" }, h("img", { src: "favicon.svg", alt: "" }), about?.script || "monarch", about && h("small", null, `pid ${about.pid}`)),
    h("nav", { "aria-label": "Pages" }, Object.entries(PAGES).map(([name, [text]]) => h("a", { key: name, href: address(name), "aria-current": page === name ? "page" : null }, text,
      name === "failures" && troubles > 0 && h("span", { class: "badge", "aria-label": plural(troubles, "problem") }, troubles)))),
    h("div", { class: "right" },
      h("span", { class: `link ${live.link}`, id: "link" }, `${LINKS[live.link]}${rest}`),
      h("button", { class: "plain", onclick: () => setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % 3]), title: "Theme: system, light, dark", id: "theme" }, { system: "◐", light: "☀", dark: "☾" }[theme()], h("span", { class: "unseen" }, ` theme: ${theme()}`)),
      h("button", { class: "plain", onclick: help, title: "Keys (?)", "aria-label": "Keys" }, "?")));
}

/** The sentence of `monarch why`: for what the script waits, and the first cause of it. */
function sentence() {
  const { waits } = live;
  if (!waits) return h("span", { class: "note" }, live.loaded ? "…" : "Loading…");
  const script = waits.nodes.find((node) => node.id === "script");
  const calls = waits.edges.filter((edge) => edge.from === "script");
  const rank = { circle: 0, silent: 1, busy: 2 };
  const causes = [...waits.causes].sort((a, b) => (rank[a.kind] ?? 3) - (rank[b.kind] ?? 3));
  const nodes = new Map(waits.nodes.map((node) => [node.id, node]));
  const old = (cause) => nodes.get(cause.node)?.age ?? 0;
  const first = causes.filter((cause) => cause.through.includes("script") || cause.kind !== "circle").sort((a, b) => old(b) - old(a))[0] ?? causes[0];
  const others = new Set(waits.causes.map((cause) => cause.node)).size - 1;
  if (!calls.length && !script) return "The script has not been reached yet.";
  if (!calls.length) return [h("b", null, "The script is running"), script.place && `: ${script.place}`, causes.length > 0 && [". Held up elsewhere: ", because(first)]];
  return [h("b", null, `The script waits for ${calls[0].call}`), ` since ${seconds(calls[0].seconds + Math.max(0, now() - waits.as_of_us / 1e6))}`,
    first && [", because ", because(first), others > 0 && [" (", h("a", { href: "#/waits" }, `${plural(others, "more cause")}`), ")"]], "."];
}

function because(cause) {
  const found = live.byRef.get(cause.node);
  const plain = cause.text.replace(/^\S+ /, "");
  if (cause.kind === "circle") return h("a", { href: "#/waits" }, `${plural(cause.through.length + 1, "actor")} wait for each other`);
  if (cause.kind === "silent") return ["the process of ", actorLink(cause.node), " does not answer"];
  const node = live.waits.nodes.find((each) => each.id === cause.node);
  if (found && node && cause.kind === "busy") return [actorLink(cause.node), ` has been in ${node.endpoint}() for ${seconds((node.age ?? 0) + Math.max(0, now() - live.waits.as_of_us / 1e6))}`];
  return found && plain !== cause.text ? [actorLink(cause.node), ` ${plain}`] : cause.text;
}

function drawLine() {
  const all = counts();
  line.className = live.link === "lost" || live.link === "refused" ? "bad" : live.link === "stale" ? "warn" : "";
  document.documentElement.classList.toggle("dim", ["lost", "stale", "refused"].includes(live.link));
  const age = `It shows ${clock(now() * 1e6)}, ${seconds(staleness())} ago.`;
  const banner = {
    lost: ["The server does not answer.", `${live.loaded ? age : ""} Trying again…`, h("button", { onclick: connect }, "Try now")],
    stale: ["The script does not answer.", `${age} It may be stopped, or busy in native code. The page goes on when it answers.`],
    refused: ["This page has no access (any longer).", "The job was started again, or the link was made by another user. Open it anew: ", h("code", null, "monarch dashboard")],
  }[live.link];
  morph(line, banner && h("div", { class: "banner", role: "alert" }, h("b", null, banner[0]), ...banner.slice(1)), h("div", { class: "why" }, sentence()), countLinks(all));
}

// -- pages ---------------------------------------------------------------------------------------

let shown = null;
let current = "";
async function navigate() {
  const { page } = route();
  tip(null);
  drawHead();
  drawLine();
  if (page !== current) {
    const tabs = head.querySelector("nav");
    const tab = tabs.querySelector("[aria-current]");
    if (tab) tabs.scrollLeft = tab.offsetLeft - (tabs.clientWidth - tab.clientWidth) / 2; // on a narrow screen
    current = page;
    shown?.unmount?.();
    shown = null;
    const [, load] = PAGES[page] ?? [];
    main.replaceChildren();
    if (!load) {
      morph(main, h("div", { class: "card empty" }, "There is no such page. ", h("a", { href: "#/meshes" }, "Meshes")));
      document.title = "monarch";
    } else {
      const module = await load();
      if (current !== page) return;
      document.title = `${module.title} · ${live.about?.script ?? "monarch"}`;
      const root = h("div", { class: "page", "data-page": page });
      main.replaceChildren(root);
      shown = module.mount(root, { tip, say });
    }
  }
  shown?.render?.();
  updateDrawer();
}
addEventListener("hashchange", navigate);

listen((kinds) => {
  drawHead();
  drawLine();
  if (shown && [...kinds].some((kind) => shown.kinds.includes(kind))) shown.render();
  updateDrawer();
  if (kinds.has("meshes") && !performance.getEntriesByName("first-picture").length) requestAnimationFrame(() => performance.mark("first-picture"));
});
setInterval(() => { // ages grow by themselves
  if (document.hidden) return;
  drawHead();
  drawLine();
  if (shown?.kinds.includes("tick")) shown.render();
  updateDrawer();
}, 1000);

// -- keys ----------------------------------------------------------------------------------------

function help() {
  const rows = [["1 … 7", "the pages"], ["/", "filter or statement"], ["Esc", "closes the details"], ["Tab, arrows, Enter", "into a grid, along it, details"], ["n", "in a grid: the next rank in trouble"], ["t", "theme"], ["?", "these keys"]];
  const box = h("dialog", { "aria-label": "Keys" }, h("h2", null, "Keys"), h("dl", null, rows.map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)])), h("form", { method: "dialog" }, h("button", null, "Close")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName);
  if (event.key === "Escape") { tip(null); if (!closeDrawer() && typing) event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { main.querySelector("input[type=search], textarea")?.focus(); event.preventDefault(); }
  else if (event.key === "?") help();
  else if (event.key === "t") at("theme").click();
  else if (/^[1-7]$/.test(event.key)) location.hash = address(Object.keys(PAGES)[event.key - 1]);
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

if (!location.hash) history.replaceState(null, "", "#/meshes");
navigate();
connect();
