// Log records with filters; the newest first.

import { h, morph } from "../dom.js";
import { clock } from "../format.js";
import { change, route } from "../route.js";
import { choice, search } from "../parts.js";
import { OFF, poll } from "../poll.js";

export const title = "Logs";
const LEVELS = [["", "all levels"], ["INFO", "info and above"], ["WARNING", "warnings and above"], ["ERROR", "errors"]];
const FILTERS = ["level", "actor", "rank", "text"];

export function mount(root) {
  const path = () => `logs?${new URLSearchParams({ limit: 300, ...Object.fromEntries(FILTERS.map((name) => [name, route().params[name] ?? ""]).filter(([, value]) => value)) })}`;
  let asked = path();
  let stopped = false;
  let older = [];
  let next = null;
  let held = null;
  const found = poll(path, 2000, render);

  async function more() {
    const { ask } = await import("../state.js");
    const start = next ?? found.data.next;
    stopped = true;
    held = held ?? found.data.records;
    const answer = await ask(`${path()}&cursor=${encodeURIComponent(start)}`);
    older = [...older, ...answer.records];
    next = answer.next ?? "";
    render();
  }

  function render() {
    if (asked !== path()) { asked = path(); older = []; next = null; held = null; found.again(); }
    const { params } = route();
    const records = [...(stopped ? (held ??= found.data?.records ?? []) : (held = null, found.data?.records ?? [])), ...older];
    const waiting = stopped && found.data ? found.data.records.filter((each) => each.timestamp_us > (held[0]?.timestamp_us ?? 0)).length : 0;
    const end = next ?? found.data?.next;
    morph(root,
      h("div", { class: "title" }, h("h1", null, "Logs"), h("div", { class: "bar" },
        search("text", "Text"), search("actor", "Actor"), search("rank", "Rank", "short"), choice("level", "Level", LEVELS, ""),
        h("button", { "aria-pressed": String(!stopped), title: "show new lines as they come", onclick: () => { stopped = !stopped; if (!stopped) { older = []; next = null; } render(); } }, stopped ? `Follow${waiting ? ` (${waiting} new)` : ""}` : "Following"),
        FILTERS.some((name) => params[name]) && h("button", { class: "plain", onclick: () => change(Object.fromEntries(FILTERS.map((name) => [name, ""]))) }, "Clear"))),
      found.fault && h("p", { class: "bad" }, found.fault),
      !found.data ? h("div", { class: "card empty" }, found.fault ? "" : "Loading…")
        : !found.data.telemetry ? h("div", { class: "card empty" }, OFF.map((part, i) => (i % 2 ? h("code", null, part) : part)))
          : !records.length ? h("div", { class: "card empty" }, "No record fits.")
            : h("section", { class: "card log", role: "log", "aria-label": "Log records" }, records.map((record) => h("div", { class: record.level, key: `${record.timestamp_us} ${record.actor} ${record.message}` },
              h("time", { title: new Date(record.timestamp_us / 1000).toISOString() }, clock(record.timestamp_us, true)), h("span", null, record.level.toLowerCase()), h("span", { class: "who", title: record.actor }, record.actor || record.logger || ""),
              h("span", { class: "message", title: record.file ? `${record.file}:${record.line}` : null }, marked(record.message, params.text), record.step !== null && record.step !== undefined && h("span", { class: "note" }, `  step ${record.step}`)))))
      , end && h("p", null, h("button", { onclick: more }, "Older records")));
  }
  return { render, kinds: [], unmount: found.end };
}

/** The text with what was searched for marked. */
function marked(message, text) {
  const at = text ? message.toLowerCase().indexOf(text.toLowerCase()) : -1;
  return at < 0 ? message : [message.slice(0, at), h("mark", null, message.slice(at, at + text.length)), message.slice(at + text.length)];
}
