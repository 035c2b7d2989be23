// Details of one actor: the call, its wait, its stack, queue, process.

import { h, morph } from "./dom.js";
import { actorAt } from "./grid.js";
import { STATES, ageOf, ask, live, stateOf } from "./state.js";
import { bytes, clock, percent, rankName, seconds } from "./format.js";
import { change, route } from "./route.js";
import { actorLink, dot, stackList } from "./parts.js";

const element = document.getElementById("drawer");
let shown = ""; // the key of the actor
let details = null;
let fault = "";
let loading = 0;
let before = null; // what had the focus
let threads = null; // of its process: {busy}, {fault} or {traces, warnings}

export function closeDrawer() {
  if (!route().params.actor) return false;
  change({ actor: "" });
  return true;
}

/** Ask for the stacks: when it opens, and when the actor does something else. */
async function load(ref) {
  const mine = (loading += 1);
  try {
    const found = await ask(`actors/${encodeURIComponent(ref)}/live`);
    if (mine === loading) [details, fault] = [found, ""];
  } catch (error) {
    if (mine === loading) fault = error.message;
  }
  if (mine === loading) render();
}

/** Ask for the stacks of all threads: by py-spy where it is installed and allowed, else by the process. */
async function capture(proc) {
  const of = shown;
  threads = { busy: true };
  render();
  let found;
  try {
    const { result } = await ask("pyspy/capture", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ proc_ref: proc }) });
    found = result.Ok ? { traces: result.Ok.stack_traces, warnings: result.Ok.warnings ?? [] } : { fault: result.Failed?.stderr ?? "py-spy is not installed where the script runs: pip install 'pymonarch[native]'" };
  } catch (error) { found = { fault: error.message }; }
  if (of === shown) { threads = found; render(); }
}

const threadList = () => threads?.traces && [threads.warnings.map((text) => h("p", { class: "note" }, text)), threads.traces.map((trace) => h("details", { key: `thread-${trace.thread_id}` },
  h("summary", null, trace.thread_name || `thread ${trace.os_thread_id ?? ""}`, h("span", { class: "note" }, [trace.active ? " · runs" : "", trace.owns_gil ? " · holds the interpreter lock" : ""].join(""))),
  stackList(trace.frames.map((frame) => `${frame.name}() at ${frame.filename}:${frame.line}`))))];

let signature = "";
export function updateDrawer() {
  const key = route().params.actor ?? "";
  if (key !== shown) {
    if (key && !shown) before = document.activeElement;
    [shown, details, fault, signature, threads] = [key, null, "", "", null];
    element.hidden = !key;
    document.documentElement.classList.toggle("open", Boolean(key));
    if (key) { render(); element.querySelector("button")?.focus(); } else { before?.focus?.(); before = null; }
  }
  if (!shown) return;
  const found = actorAt(shown);
  if (found && live.link === "live") {
    const [mesh, i] = found;
    const doing = `${mesh.state[i]} ${mesh.endpoint[i]} ${mesh.place[i]}`;
    if (doing !== signature) { signature = doing; load(mesh.refs[i]); }
  }
  render();
}

function render() {
  const found = actorAt(shown);
  const close = h("button", { onclick: closeDrawer, title: "Esc", "aria-label": "Close" }, "✕");
  if (!found) {
    morph(element, h("div", { class: "top" }, h("h2", null, shown), close), h("p", { class: "note" }, live.loaded ? "This actor is not in the job now. It has ended, or its mesh was spawned again." : "Loading…"));
    return;
  }
  const [mesh, i] = found;
  const state = STATES[stateOf(mesh, i)];
  const ref = mesh.refs[i];
  const process = live.procs.get(mesh.proc[i]);
  const doing = details?.doing ?? [];
  const wait = doing.map((each) => each.wait).find(Boolean);
  const group = live.failures?.groups.find((each) => each.actors.some((actor) => actor.ref === ref));
  const waiters = [...new Set((live.waits?.edges ?? []).filter((edge) => edge.to === ref).map((edge) => edge.from))];
  const silent = live.failures?.silent.find((each) => each.proc === mesh.proc[i]);
  const row = (name, value) => value && [h("dt", null, name), h("dd", null, value)];
  morph(element,
    h("div", { class: "top" }, h("h2", null, rankName(mesh, mesh.rank[i])), close),
    h("dl", null,
      row("State", [dot(state), state, mesh.endpoint[i] && ` in ${mesh.endpoint[i]}()`]),
      row("Since", seconds(ageOf(mesh, i))),
      row("Waits for", wait && `${wait.call}${wait.limit ? `, at most ${seconds(wait.limit)}` : ""}${wait.asked > 1 ? `, ${wait.asked} actors asked` : ""}`),
      row("Waited for by", waiters.length > 0 && h("span", null, waiters.slice(0, 6).map((each, at) => [at > 0 && ", ", actorLink(each)]), waiters.length > 6 && ` and ${waiters.length - 6} more`)),
      row("Queue", mesh.queued[i] ? `${mesh.queued[i]} waiting` : "empty"),
      row("Class", mesh.class),
      row("Rank", `${mesh.rank[i]} of ${mesh.count}`),
      process && [row("Host", process.host), row("Process", `pid ${process.pid}${process.label ? `, ${process.label}` : ""}`), row("Memory", bytes(process.rss)), row("CPU", `${percent(process.cpu_percent)}, ${seconds(process.cpu)} in all`)]),
    silent && h("p", { class: "bad" }, `The process does not answer: ${silent.text}`),
    fault && h("p", { class: "note" }, fault),
    doing.map((each) => [
      h("h3", null, doing.length > 1 ? `Stack of ${each.endpoint}(), ${seconds(each.seconds)}` : "Stack, innermost line first"),
      each.stack?.length ? stackList(each.stack) : h("p", { class: "note" }, each.place || "No line of the program is known.")]),
    process?.ref && [h("h3", null, "Threads of the process"), h("p", null, h("button", { disabled: Boolean(threads?.busy), onclick: () => capture(process.ref) }, threads?.busy ? "Asking…" : threads ? "Ask again" : "Show all threads")), threads?.fault && h("p", { class: "bad" }, threads.fault), threadList()],
    group && [h("h3", null, `Failed at ${clock(group.last_us)}`), h("p", { class: "mono bad" }, group.error), frames(group), h("details", null, h("summary", null, "Traceback"), h("pre", { class: "text" }, group.traceback))],
    h("h3", null, "Elsewhere"),
    h("p", null, h("a", { href: `#/logs?${new URLSearchParams({ actor: mesh.name, rank: mesh.rank[i] })}` }, "Its log lines"), " · ", h("a", { href: "#/waits" }, "Waits")));
}

/** Frames of a failure: those of the user first, as the API sorts them. */
export const frames = (group) => h("ol", { class: "stack" }, group.frames.map((frame) => h("li", { class: frame.user ? "" : "lib" },
  `${frame.function}()`, h("span", { class: "where" }, `  ${frame.file}:${frame.line}`), frame.code && h("pre", null, frame.code))));
