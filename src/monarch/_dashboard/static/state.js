// The live state: meshes with their ranks as arrays, processes, and the connection. One stream
// carries the changes; it is closed while the page is hidden. A stream is read with fetch, not with
// EventSource, since that shows neither heartbeats nor the status of a refusal.

export const STATES = ["idle", "busy", "waiting", "stuck", "silent", "failed", "stopped", "starting", "stopping"];
const STUCK = 10; // seconds in one call, from which on it is "stuck" here as in the API
const SILENCE = 25000; // milliseconds without a byte; the server sends a heartbeat each 10 s

export const live = {
  link: "wait", // wait, live, stale, lost, refused
  linkSince: Date.now(),
  about: null,
  meshes: [], // {id, key, name, class, system, labels, sizes, count, states, since, queued, ...}
  byId: new Map(),
  byRef: new Map(), // reference -> [mesh, place]
  procs: new Map(),
  waits: null,
  failures: null,
  loaded: false,
};

const listeners = new Set();
export const listen = (listener) => (listeners.add(listener), () => listeners.delete(listener));
let queued = new Set();
/** Announce a change of `what` ("actors", "procs", "waits", "failures", "link", "meshes") once per frame. */
export function emit(what) {
  if (!queued.size) requestAnimationFrame(() => {
    const kinds = queued;
    queued = new Set();
    for (const listener of [...listeners]) listener(kinds);
  });
  queued.add(what);
}

export class Refusal extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

/** Ask the API; the answer as data. Errors have the text of the server. */
export async function ask(path, options = {}) {
  const response = await fetch(`api/${path}`, { signal: AbortSignal.timeout(30000), ...options });
  const data = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refusal(response.status, typeof data.error === "string" ? data.error : data.error?.message ?? `the server answered ${response.status}`);
  return data;
}

// -- time: the clock of the server, which stands still without it ---------------------------------

let offset = 0; // server minus client, in seconds
let latest = 0; // the latest moment of the server that was received
let byteAt = 0; // when something was received, by the clock of this machine
const here = () => Date.now() / 1000;
function heard(us) {
  byteAt = here();
  if (!us || us / 1e6 < latest) return;
  latest = us / 1e6;
  offset = latest - here();
}
/** The moment that the page shows, in seconds since 1970. */
export const now = () => (live.link === "live" ? here() : Math.min(byteAt, here())) + offset;
/** The age of what is shown, in seconds. */
export const staleness = () => here() - byteAt;

// -- meshes --------------------------------------------------------------------------------------

function take(grid) {
  heard(grid.as_of_us);
  const keys = new Map();
  const at = grid.as_of_us / 1e6;
  live.byId.clear();
  live.byRef.clear();
  live.meshes = grid.meshes.map((row) => {
    const nth = (keys.get(row.name) ?? 0) + 1;
    keys.set(row.name, nth);
    const count = row.ranks.length;
    const mesh = {
      ...row, key: nth > 1 ? `${row.name}~${nth}` : row.name, count,
      rank: new Int32Array(count), state: new Uint8Array(count), since: new Float64Array(count).fill(NaN),
      queued: new Int32Array(count), endpoint: new Array(count), place: new Array(count), proc: new Array(count), refs: new Array(count),
    };
    const map = row.ranks.map ? grid.states.map((state) => Math.max(0, STATES.indexOf(state))) : [];
    row.ranks.forEach(([rank, state, endpoint, age, waiting, proc, place, ref], i) => {
      mesh.rank[i] = rank;
      mesh.state[i] = map[state];
      if (age !== null) mesh.since[i] = at - age;
      mesh.queued[i] = waiting;
      mesh.endpoint[i] = row.endpoints[endpoint];
      mesh.place[i] = row.places[place];
      mesh.proc[i] = row.procs[proc];
      mesh.refs[i] = ref;
      live.byRef.set(ref, [mesh, i]);
    });
    delete mesh.ranks;
    live.byId.set(mesh.id, mesh);
    return mesh;
  });
  live.meshes.sort((a, b) => a.system - b.system || b.count - a.count || (a.name < b.name ? -1 : 1));
  live.loaded = true;
  emit("meshes");
  emit("actors");
}

let fetching = null;
let again = false;
async function fetchGrid() {
  if (fetching) { again = true; return fetching; }
  fetching = ask("grid").then(take).catch(() => {}).finally(() => {
    fetching = null;
    if (again) { again = false; setTimeout(fetchGrid, 500); }
  });
  return fetching;
}

function applyActors({ as_of_us, changed, removed }) {
  heard(as_of_us);
  const at = as_of_us / 1e6;
  let strange = removed.some((ref) => live.byRef.has(ref));
  for (const row of changed) {
    const found = live.byRef.get(row.ref);
    if (!found) { strange = true; continue; }
    const [mesh, i] = found;
    mesh.state[i] = Math.max(0, STATES.indexOf(row.state));
    mesh.since[i] = row.age === null ? NaN : at - row.age;
    mesh.queued[i] = row.queued;
    mesh.endpoint[i] = row.endpoint;
    mesh.place[i] = row.place;
  }
  if (strange) fetchGrid();
  emit("actors");
  if (changed.length || removed.length) refresh();
}

/** The state of a rank now: busy for long is stuck. */
export function stateOf(mesh, i) {
  const state = mesh.state[i];
  return state === 1 && now() - mesh.since[i] > STUCK ? 3 : state;
}
export function ageOf(mesh, i) {
  const since = mesh.since[i];
  return Number.isNaN(since) ? null : Math.max(0, now() - since);
}

/** Counts by state, of one mesh or of all that are not the library's own. */
export function counts(meshes = live.meshes.filter((mesh) => !mesh.system)) {
  const found = new Array(STATES.length).fill(0);
  for (const mesh of meshes) for (let i = 0; i < mesh.count; i += 1) found[stateOf(mesh, i)] += 1;
  return found;
}

// -- what is derived from actors: asked for at most every two seconds, when something changed ------

let timer = null;
let asked = 0;
export function refresh(at_once = false) {
  if (timer && !at_once) return;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    asked = Date.now();
    const [waits, failures] = await Promise.allSettled([ask("waits"), ask("failures")]);
    timer = null;
    if (waits.status === "fulfilled") { live.waits = waits.value; emit("waits"); }
    if (failures.status === "fulfilled") { live.failures = failures.value; emit("failures"); }
  }, at_once ? 0 : Math.max(0, asked + 2000 - Date.now()));
}

// -- the stream ----------------------------------------------------------------------------------

let control = null;
let attempt = 0;
let retry = null;

function link(state) {
  if (state === live.link) return;
  live.link = state;
  live.linkSince = Date.now();
  emit("link");
}

function handle(kind, data) {
  if (data.as_of_us) heard(data.as_of_us);
  if (kind === "hello") {
    live.about = data.about;
    heard(data.about?.now_us);
    link(data.about?.stale ? "stale" : "live");
  } else if (kind === "actors") { if (live.loaded) applyActors(data); else fetchGrid(); }
  else if (kind === "procs") {
    for (const row of data.changed) live.procs.set(row.proc, row);
    for (const proc of data.removed) live.procs.delete(proc);
    emit("procs");
  } else if (kind === "failures") refresh(true);
  else if (kind === "stale") link("stale");
  else if (kind === "fresh") link("live");
  else if (kind === "lost") fetchGrid();
}

export async function connect() {
  clearTimeout(retry);
  control?.abort();
  if (document.hidden) return;
  const mine = (control = new AbortController());
  let quiet;
  const watch = () => { clearTimeout(quiet); quiet = setTimeout(() => mine.abort(), SILENCE); };
  try {
    watch();
    const response = await fetch("api/stream", { signal: mine.signal, cache: "no-store" });
    if (!response.ok) throw new Refusal(response.status, "");
    fetchGrid();
    refresh(true);
    attempt = 0;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      watch();
      byteAt = here();
      const from = Math.max(0, buffer.length - 1);
      buffer += value;
      let start = 0;
      for (let end; (end = buffer.indexOf("\n\n", Math.max(start, from))) >= 0; start = end + 2) event(buffer.slice(start, end));
      buffer = buffer.slice(start);
    }
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) {
      if (control === mine) link("refused");
      return;
    }
  } finally {
    clearTimeout(quiet);
  }
  if (control !== mine || document.hidden) return;
  link("lost");
  attempt += 1;
  retry = setTimeout(connect, Math.min(5000, 400 * 1.6 ** attempt));
}

function event(text) {
  let kind = "message";
  let data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("data:")) data += line.slice(5).trim();
  }
  if (data) handle(kind, JSON.parse(data));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { clearTimeout(retry); control?.abort(); } else connect();
});
