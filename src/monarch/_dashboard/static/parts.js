// What several pages draw: states, links to actors, stacks, tables that can be sorted.

import { h } from "./dom.js";
import { STATES, live } from "./state.js";
import { actorKey } from "./grid.js";
import { number, rankName } from "./format.js";
import { address, change, route } from "./route.js";

export const dot = (state) => h("i", { class: `dot s-${state}`, "aria-hidden": "true" });

/** The name of an actor for people, by its reference; `fallback` if it is not in the picture. */
export function nameOf(ref, fallback = "") {
  if (ref === "script") return "the script";
  const found = live.byRef.get(ref);
  return found ? rankName(found[0], found[0].rank[found[1]]) : fallback || "an actor";
}

/** A link that opens the drawer over the present page. */
export function actorLink(ref, fallback = "") {
  const found = live.byRef.get(ref);
  const name = nameOf(ref, fallback);
  if (!found) return name;
  const { page, params } = route();
  return h("a", { class: "mono", href: address(page, { ...params, actor: actorKey(...found) }) }, name);
}

/** Counts by state as links to the meshes page, which highlight the state; again: all states. */
export function countLinks(found, mesh = "") {
  const { page, params } = route();
  const on = (state) => page === "meshes" && params.state === state;
  return h("div", { class: "counts" }, found.map((count, i) => (count > 0 || (on(STATES[i]) && !mesh)) && h("a", {
    href: address("meshes", { ...(page === "meshes" ? params : {}), state: on(STATES[i]) ? "" : STATES[i], ...(mesh && { mesh }) }), key: STATES[i],
    title: on(STATES[i]) ? "show all states" : `highlight the ${STATES[i]} ones`, "aria-current": on(STATES[i]) && !mesh ? "true" : null,
  }, dot(STATES[i]), h("b", null, number(count)), " ", h("span", null, STATES[i]))));
}

/** Lines such as "step() at /home/ann/train.py:12". */
export const stackList = (lines) => h("ol", { class: "stack" }, lines.map((line) => {
  const at = line.indexOf(" at ");
  const [call, where] = at < 0 ? [line, ""] : [line.slice(0, at), line.slice(at + 4)];
  return h("li", null, call, where && h("div", { class: "where" }, where));
}));

/**
 * A table with columns {name, title, value(row), cell?(row), number?}. The order is part of the
 * address (`sort=name` or `sort=-name`).
 */
export function table(columns, rows, { sort, key, chosen, onrow, limit = 500, label }) {
  const wanted = route().params.sort ?? sort ?? "";
  const down = wanted.startsWith("-");
  const by = columns.find((column) => column.name === wanted.replace(/^-/, ""));
  let shown = rows;
  if (by) {
    const value = (row) => by.value(row) ?? -Infinity;
    shown = [...rows].sort((a, b) => { const x = value(a); const y = value(b); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
  }
  const head = columns.map((column) => h("th", {
    class: column.number ? "n" : "", scope: "col", "aria-sort": by === column ? (down ? "descending" : "ascending") : null,
  }, column.plain ? h("span", null, column.title) : h("button", { type: "button", onclick: () => change({ sort: by === column && down === Boolean(column.number) ? (down ? column.name : `-${column.name}`) : column.number ? `-${column.name}` : column.name }) }, column.title, by === column ? (down ? " ↓" : " ↑") : "")));
  const body = shown.slice(0, limit).map((row) => h("tr", { key: key(row), class: chosen === key(row) ? "on" : "", onclick: onrow && (() => onrow(row)) },
    columns.map((column) => h("td", { class: column.number ? "n" : column.name === columns[0].name ? "w" : "" }, (column.cell ?? column.value)(row)))));
  return [
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, body))),
    rows.length > limit && h("p", { class: "note" }, `The first ${number(limit)} of ${number(rows.length)} rows are shown; the filter finds the others.`),
  ];
}

export const meter = (part) => h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: `width:${Math.round(100 * Math.max(0, Math.min(1, part || 0)))}%` }));

/** A search field whose text is a parameter of the address. */
export function search(name, label, kind = "") {
  let timer;
  return h("input", { type: "search", class: kind, placeholder: label, "aria-label": label, value: route().params[name] ?? "", key: `in-${name}`,
    oninput: (event) => { const { value } = event.target; clearTimeout(timer); timer = setTimeout(() => change({ [name]: value }, true), 200); } });
}

export function choice(name, label, options, usual) {
  const value = route().params[name] ?? usual;
  return h("select", { "aria-label": label, key: `in-${name}`, onchange: (event) => change({ [name]: event.target.value === usual ? "" : event.target.value }) },
    options.map(([option, text]) => h("option", { value: option, selected: option === value }, text)));
}
