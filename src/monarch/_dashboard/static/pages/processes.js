// Memory and processor time of hosts and processes.

import { h, morph } from "../dom.js";
import { ask, emit, live } from "../state.js";
import { bytes, number, percent, plural, seconds } from "../format.js";
import { change, route } from "../route.js";
import { meter, search, table } from "../parts.js";

export const title = "Processes";
const KERNEL = { R: "runs", S: "sleeps", D: "waits for a device", T: "stopped", t: "traced", Z: "has exited" };

export function mount(root) {
  if (!live.procs.size) ask("processes").then((found) => { for (const row of found.processes) live.procs.set(row.proc, row); emit("procs"); }).catch(() => {});

  function render() {
    const { params } = route();
    const all = [...live.procs.values()];
    const hosts = new Map();
    for (const row of all) {
      const host = hosts.get(row.host) ?? { host: row.host, count: 0, rss: 0, cpu: 0, silent: 0, failed: 0 };
      host.count += 1;
      host.rss += row.rss;
      host.cpu += row.cpu_percent ?? 0;
      host.silent += row.answers ? 0 : 1;
      hosts.set(row.host, host);
    }
    for (const host of live.failures?.lost_hosts ?? []) hosts.set(host, { host, lost: true });
    const list = [...hosts.values()].sort((a, b) => Boolean(b.lost) - Boolean(a.lost) || a.host.localeCompare(b.host, "en", { numeric: true }));
    const most = Math.max(1, ...list.map((host) => host.rss ?? 0));
    const text = (params.text ?? "").toLowerCase();
    const shown = all.filter((row) => (!params.host || row.host === params.host) && `${row.label} ${row.pid} ${row.host}`.toLowerCase().includes(text));
    const largest = Math.max(1, ...shown.map((row) => row.rss));
    morph(root,
      h("div", { class: "title" }, h("h1", null, "Processes"), h("p", null, `${plural(all.length, "process").replace("processs", "processes")} on ${plural(hosts.size, "host")}`), h("div", { class: "bar" }, search("text", "Filter: mesh, pid, host"))),
      h("div", { class: "hosts" }, list.slice(0, 60).map((host) => h("button", { class: `host${host.lost ? " lost" : ""}`, key: host.host, "aria-pressed": String(params.host === host.host), onclick: () => change({ host: params.host === host.host ? "" : host.host }) },
        h("div", null, h("b", null, host.host), host.lost ? h("b", { class: "bad" }, "lost") : h("span", null, plural(host.count, "process").replace("processs", "processes"))),
        !host.lost && [h("div", null, h("span", null, "memory"), bytes(host.rss)), meter(host.rss / most), h("div", null, h("span", null, "CPU"), percent(host.cpu)), meter(host.cpu / (100 * host.count)),
          host.silent > 0 && h("div", { class: "bad" }, plural(host.silent, "silent process").replace("processs", "processes"))]))),
      list.length > 60 && h("p", { class: "note" }, `60 of ${number(list.length)} hosts are shown.`),
      h("section", { class: "card" }, shown.length ? table([
        { name: "mesh", title: "Process", value: (row) => row.label || `process ${row.pid}`, cell: (row) => [row.label || (row.client ? "the script" : `process ${row.pid}`), row.failed > 0 && h("b", { class: "bad" }, ` ${row.failed} failed`)] },
        { name: "pid", title: "Pid", number: true, value: (row) => row.pid },
        { name: "host", title: "Host", value: (row) => row.host },
        { name: "rss", title: "Memory", number: true, value: (row) => row.rss, cell: (row) => [bytes(row.rss), meter(row.rss / largest)] },
        { name: "cpu", title: "CPU", number: true, value: (row) => row.cpu_percent, cell: (row) => [percent(row.cpu_percent), meter(row.cpu_percent / 100)] },
        { name: "time", title: "CPU time", number: true, value: (row) => row.cpu, cell: (row) => seconds(row.cpu) },
        { name: "actors", title: "Actors", number: true, value: (row) => row.actors },
        { name: "queued", title: "Queued", number: true, value: (row) => row.queued },
        { name: "state", title: "State", value: (row) => row.state, cell: (row) => (row.answers ? KERNEL[row.state] ?? row.state : h("b", { class: "bad" }, `silent: ${KERNEL[row.state] ?? row.state}`)) },
      ], shown, { sort: "-rss", key: (row) => row.proc, label: "Processes" }) : h("div", { class: "empty" }, all.length ? "No process fits the filter." : "Loading…")));
  }
  return { render, kinds: ["procs", "failures"] };
}
