// Rates and latencies of endpoints.

import { h, morph } from "../dom.js";
import { micros, number, rate } from "../format.js";
import { change, route } from "../route.js";
import { choice, search, table } from "../parts.js";
import { chart, spark } from "../charts.js";
import { OFF, poll } from "../poll.js";

export const title = "Messages";
const WINDOWS = [["60", "last minute"], ["300", "last 5 minutes"], ["900", "last 15 minutes"], ["3600", "last hour"]];

export function mount(root) {
  const wanted = () => route().params.window ?? "300";
  let asked = wanted();
  const rows = poll(() => `endpoints?window=${wanted()}`, 5000, render);
  const past = poll(() => `endpoints/history?window=${wanted()}&buckets=60`, 5000, render);
  const key = (row) => `${row.mesh}.${row.endpoint}`;

  function render() {
    const { params } = route();
    if (asked !== wanted()) { asked = wanted(); rows.again(); past.again(); }
    const series = new Map((past.data?.series ?? []).map((each) => [key(each), each]));
    const text = (params.text ?? "").toLowerCase();
    const all = (rows.data?.endpoints ?? []).filter((row) => key(row).toLowerCase().includes(text));
    const chosen = all.find((row) => key(row) === params.endpoint) ?? all.reduce((best, row) => (best && best.count >= row.count ? best : row), null);
    const line = chosen && series.get(key(chosen));
    const time = past.data && { start: past.data.start_us, bucket: past.data.bucket_us };
    const per = (past.data?.bucket_us ?? 1e6) / 1e6;
    const us = (name, text_) => ({ name, title: text_, number: true, value: (row) => row[name], cell: (row) => micros(row[name]) });
    morph(root,
      h("div", { class: "title" }, h("h1", null, "Messages"), h("div", { class: "bar" }, search("text", "Filter by name"), choice("window", "Time range", WINDOWS, "300"))),
      rows.fault && h("p", { class: "bad" }, rows.fault),
      !rows.data ? h("div", { class: "card empty" }, "Loading…")
        : !rows.data.telemetry ? h("div", { class: "card empty" }, OFF.map((part, i) => (i % 2 ? h("code", null, part) : part)))
          : !all.length ? h("div", { class: "card empty" }, "No message was answered in this time.")
            : [line && h("div", { class: "pair" },
              h("section", { class: "card" }, h("div", { class: "top" }, h("h2", { class: "mono" }, `${key(chosen)}()`), h("span", { class: "note" }, h("i", { class: "key" }), "messages a second", chosen.failed > 0 && [" · ", h("span", { class: "bad" }, `${number(chosen.failed)} failed`)])),
                chart([{ values: line.count.map((count) => count / per), kind: "l1" }], { ...time, show: (value) => `${rate(value)} / s`, label: "messages a second", marks: line.failed })),
              h("section", { class: "card" }, h("div", { class: "top" }, h("h2", null, "Latency"), h("span", { class: "note" }, h("i", { class: "key" }), "median  ", h("i", { class: "key two" }), "99 %")),
                chart([{ values: line.p50_us, kind: "l1" }, { values: line.p99_us, kind: "l2" }], { ...time, show: micros, label: "latency" }))),
            h("section", { class: "card" }, table([
              { name: "endpoint", title: "Endpoint", value: key, cell: (row) => h("button", { class: "plain mono", "aria-pressed": String(row === chosen), onclick: () => change({ endpoint: key(row) }) }, `${key(row)}()`) },
              { name: "spark", title: "", plain: true, value: () => 0, cell: (row) => series.has(key(row)) && spark(series.get(key(row)).count) },
              { name: "rate", title: "Per second", number: true, value: (row) => row.rate, cell: (row) => rate(row.rate) },
              { name: "count", title: "Messages", number: true, value: (row) => row.count, cell: (row) => number(row.count) },
              { name: "failed", title: "Failed", number: true, value: (row) => row.failed, cell: (row) => (row.failed ? h("b", { class: "bad" }, number(row.failed)) : "0") },
              us("p50_us", "Median"), us("p95_us", "95 %"), us("p99_us", "99 %"), us("max_us", "Longest"), us("queued_p99_us", "Queued, 99 %"),
            ], all, { sort: "-count", key, chosen: chosen && key(chosen), onrow: (row) => change({ endpoint: key(row) }), label: "Endpoints" }),
            rows.data.endpoints.some((row) => row.sampled) && h("p", { class: "note" }, "Made of the latest 50,000 messages."))]);
  }
  return { render, kinds: ["meshes"], unmount: () => { rows.end(); past.end(); } };
}
