// A console for SQL: one statement, its table, what was asked before.

import { h, hold, morph } from "../dom.js";
import { ask } from "../state.js";
import { number, seconds } from "../format.js";
import { change, route } from "../route.js";
import { table } from "../parts.js";

export const title = "SQL";
const EXAMPLES = [
  ["Tables", "SHOW TABLES"], ["Columns", "DESCRIBE messages"],
  ["Messages by endpoint", "SELECT endpoint, count(*) AS n\nFROM messages GROUP BY 1 ORDER BY n DESC"],
  ["Actors by state", "SELECT new_status, count(*) AS n\nFROM actor_status_events GROUP BY 1 ORDER BY n DESC"],
  ["Slowest spans", "SELECT name, target FROM spans LIMIT 20"],
  ["Last failures", "SELECT a.full_name, s.reason\nFROM actor_status_events s JOIN actors a ON a.id = s.actor_id\nWHERE s.new_status = 'Failed' ORDER BY s.timestamp_us DESC LIMIT 20"],
];
const stored = () => { try { return JSON.parse(localStorage.getItem("sql") ?? "[]"); } catch { return []; } };

export function mount(root) {
  let sql = route().params.q ?? stored()[0] ?? "SELECT endpoint, count(*) AS n\nFROM messages GROUP BY 1 ORDER BY n DESC";
  let state = {};
  let copied = "";
  const field = h("textarea", { class: "editor", rows: 5, spellcheck: "false", "aria-label": "SQL statement", value: sql,
    oninput: () => { sql = field.value; }, onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); } } });
  const put = (text) => { field.value = sql = text; field.focus(); };

  async function run() {
    if (state.running || !sql.trim()) return;
    const begun = performance.now();
    state = { running: true };
    copied = "";
    change({ q: sql, sort: "" }, true);
    render();
    try {
      const answer = await ask("query?shape=values&ids=strings", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ sql, limit: 1000 }) });
      const rows = answer.values ?? answer.rows.map((row) => (Array.isArray(row) ? row : answer.columns.map((name) => row[name])));
      state = { answer, rows, took: (performance.now() - begun) / 1000 };
      try { localStorage.setItem("sql", JSON.stringify([sql, ...stored().filter((each) => each !== sql)].slice(0, 30))); } catch { /* no storage, no history */ }
    } catch (error) {
      state = { fault: error.name === "TypeError" ? "The server does not answer." : error.message };
    }
    render();
  }

  async function copy() {
    const cell = (value) => (value === null || value === undefined ? "" : /[",\n\r]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
    const text = [state.answer.columns, ...state.rows].map((row) => row.map(cell).join(",")).join("\r\n");
    try { await navigator.clipboard.writeText(text); copied = "Copied"; } catch { download(text); copied = "Saved as a file"; }
    render();
  }

  function download(text) {
    const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: "query.csv" });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  function render() {
    const { answer, rows } = state;
    const show = (value) => (value === null || value === undefined ? h("span", { class: "null" }, "null") : typeof value === "object" ? JSON.stringify(value) : String(value));
    morph(root,
      h("div", { class: "title" }, h("h1", null, "SQL"), h("p", null, "one statement that reads: SELECT, EXPLAIN, SHOW TABLES, DESCRIBE"), h("div", { class: "bar" },
        h("select", { "aria-label": "Examples", value: "", key: "examples", onchange: (event) => { if (event.target.value) put(EXAMPLES[event.target.value][1]); event.target.value = ""; } }, h("option", { value: "" }, "Examples"), EXAMPLES.map(([name], i) => h("option", { value: String(i) }, name))),
        h("select", { "aria-label": "History", value: "", key: "history", onchange: (event) => { if (event.target.value) put(stored()[event.target.value]); event.target.value = ""; } }, h("option", { value: "" }, "History"), stored().map((text, i) => h("option", { value: String(i) }, text.replace(/\s+/g, " ").slice(0, 70)))))),
      h("div", { class: "card", key: "form" }, hold(field), h("div", { class: "legend", style: "margin:8px 0 0" },
        h("button", { class: "main", onclick: run, disabled: Boolean(state.running), style: "border:1px solid;padding:4px 14px;font-size:14px;background:var(--accent)" }, state.running ? "Running…" : "Run"), h("span", { class: "note" }, h("kbd", null, "Ctrl"), " ", h("kbd", null, "Enter")),
        answer && h("span", { class: "note", id: "outcome" }, `${number(rows.length)} ${rows.length === 1 ? "row" : "rows"} in ${seconds(state.took)}${answer.truncated ? "; there are more: add a LIMIT or a WHERE" : ""}`),
        answer && rows.length > 0 && h("button", { onclick: copy, style: "border:1px solid var(--line2);padding:3px 10px" }, copied || "Copy as CSV"))),
      state.fault && h("pre", { class: "card text bad", role: "alert" }, state.fault),
      answer && (rows.length ? h("section", { class: "card result" }, table(answer.columns.map((name, i) => ({ name: String(i), title: name, value: (row) => row[i], cell: (row) => show(row[i]), number: typeof rows[0][i] === "number" })), rows, { key: (row) => (row.key ??= String(rows.indexOf(row))), limit: 1000, label: "Result" })) : h("div", { class: "card empty" }, "No rows.")));
  }
  return { render, kinds: [] };
}
