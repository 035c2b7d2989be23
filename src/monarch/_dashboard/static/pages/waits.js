// Who waits for whom: root causes first, then the graph, then the text of `monarch why`.

import { h, morph } from "../dom.js";
import { STATES, live, now, stateOf } from "../state.js";
import { number, plural, rankName, ranges, seconds } from "../format.js";
import { actorKey } from "../grid.js";
import { arrange, condense, parts } from "../layers.js";
import { change } from "../route.js";
import { actorLink, dot } from "../parts.js";

export const title = "Waits";
const [WIDE, HIGH, GAP_X, GAP_Y] = [238, 62, 74, 16];
const MOST = 80;

export function mount(root) {
  function render() {
    const { waits } = live;
    if (!waits) { morph(root, h("h1", null, "Waits"), h("div", { class: "card empty" }, "Loading…")); return; }
    const later = Math.max(0, now() - waits.as_of_us / 1e6);
    const causes = rootCauses(waits);
    const { groups, links } = condense(waits.nodes, waits.edges);
    const joined = new Set(links.flatMap((link) => [link.from, link.to]));
    const drawn = groups.filter((group) => joined.has(group)).sort((a, b) => Boolean(b.circle !== undefined) - Boolean(a.circle !== undefined) || b.age - a.age).slice(0, MOST);
    const set = new Set(drawn);
    const roots = new Set(causes.map((cause) => cause.node));
    morph(root,
      h("div", { class: "title" }, h("h1", null, "Waits"), h("p", null, waits.edges.length ? `${plural(new Set(waits.edges.map((edge) => edge.from)).size, "caller")} wait; what holds up the most is first` : "")),
      causes.length > 0
        ? h("ol", { class: "causes" }, causes.slice(0, 20).map((cause) => h("li", { class: "cause", key: cause.node + cause.kind },
          h("span", { class: "num", title: "callers that wait for it" }, number(cause.callers)),
          h("div", null, h("div", null, dot(cause.kind === "circle" ? "failed" : stateNow(cause.node_) ?? "waiting"), describe(cause, later)),
            cause.node_?.place && h("div", { class: "note mono" }, cause.node_.place),
            cause.through.size > 0 && h("div", { class: "note" }, cause.kind === "circle" ? "in the circle: " : "waits for it: ", [...cause.through].slice(0, 4).map((ref, i) => [i > 0 && ", ", actorLink(ref)]), cause.through.size > 4 && ` and ${number(cause.through.size - 4)} more`)))))
        : h("div", { class: "card empty" }, "No caller waits for an answer."),
      drawn.length > 0 && h("section", { class: "card" }, h("div", { class: "top" }, h("h2", null, "Graph"), h("span", { class: "note" }, "an arrow leads from the caller to the actor that has to answer; equal waits are one box")),
        h("div", { class: "graph", tabindex: 0, role: "region", "aria-label": "Graph of waits" }, picture(drawn, links.filter((link) => set.has(link.from) && set.has(link.to)), roots, later)),
        joined.size > MOST && h("p", { class: "note" }, `The ${MOST} oldest of ${number(joined.size)} boxes are drawn.`)),
      h("details", { class: "card", open: true }, h("summary", null, "As text, as ", h("code", null, "monarch why"), " prints it"), h("pre", { class: "text" }, waits.text), h("p", null, h("button", { onclick: () => navigator.clipboard?.writeText(waits.text) }, "Copy"))));
  }
  return { render, kinds: ["waits", "tick"] };
}

/** One entry for each cause, those with the most callers first; circles and silence before calls. */
function rootCauses(waits) {
  const nodes = new Map(waits.nodes.map((node) => [node.id, node]));
  const found = new Map();
  for (const cause of waits.causes) {
    const entry = found.get(cause.node + cause.kind) ?? { ...cause, node_: nodes.get(cause.node), through: new Set(), callers: 0 };
    for (const ref of cause.through) if (ref !== "script" || cause.through.length === 1) entry.through.add(ref);
    found.set(cause.node + cause.kind, entry);
  }
  for (const entry of found.values()) {
    entry.callers = entry.kind === "circle" ? entry.through.size + 1 : Math.max(entry.through.size, new Set(waits.edges.filter((edge) => edge.to === entry.node).map((edge) => edge.from)).size);
  }
  const grade = (cause) => ({ circle: 2, silent: 1 })[cause.kind] ?? 0;
  return [...found.values()].sort((a, b) => grade(b) - grade(a) || b.callers - a.callers || (b.node_?.age ?? 0) - (a.node_?.age ?? 0));
}

function describe(cause, later) {
  const node = cause.node_;
  if (cause.kind === "circle") return [h("b", null, "A circle: "), actorLink(cause.node), " and others wait for each other"];
  if (cause.kind === "busy" && node) return [actorLink(cause.node, node.label), ` has been in ${node.endpoint}() for ${seconds((node.age ?? 0) + later)}`, node.pid && h("span", { class: "note" }, `  pid ${node.pid} on ${node.host}`)];
  if (cause.kind === "silent") return ["The process of ", actorLink(cause.node, node?.label), " does not answer", node && h("span", { class: "note" }, `  pid ${node.pid} on ${node.host}`)];
  return cause.text;
}

function picture(groups, links, roots, later) {
  const down = innerWidth < 700;
  const position = new Map();
  let below = 4;
  for (const [own, joints] of parts(groups, links)) {
    const layers = arrange(own, joints);
    const longest = Math.max(...layers.map((row) => row.length));
    layers.forEach((row, i) => row.forEach((group, j) => {
      const shift = down ? 0 : (longest - row.length) / 2;
      position.set(group, down ? [(j + shift) * (WIDE + 20) + 4, i * (HIGH + 46) + below] : [i * (WIDE + GAP_X) + 4, (j + shift) * (HIGH + GAP_Y) + below]);
    }));
    below += down ? layers.length * (HIGH + 46) + 10 : longest * (HIGH + GAP_Y) + 26;
  }
  const width = Math.max(...[...position.values()].map(([x]) => x)) + WIDE + (down ? 36 : 8);
  const height = below;
  return h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group" },
    h("defs", null, ["", "-c"].map((kind) => h("marker", { id: `tip${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" }, h("path", { d: "M0 0L8 4L0 8z", style: kind ? "fill:var(--failed)" : "" })))),
    links.map((link) => h("path", { class: link.circle ? "cycle" : "", d: curve(position.get(link.from), position.get(link.to), down), "marker-end": `url(#tip${link.circle ? "-c" : ""})` },
      h("title", null, `${[...link.calls].join(", ")}: ${seconds(link.seconds)}`))),
    groups.map((group) => box(group, position.get(group), roots, later)));
}

function curve([x1, y1], [x2, y2], down) {
  if (down) {
    const [a, b, c, d] = [x1 + WIDE / 2, y1 + HIGH, x2 + WIDE / 2, y2 - 1];
    if (d <= b) return `M${x1 + WIDE} ${y1 + HIGH / 2}C${x1 + WIDE + 30} ${y1 + HIGH / 2} ${x2 + WIDE + 30} ${y2 + HIGH / 2} ${x2 + WIDE + 2} ${y2 + HIGH / 2}`;
    return `M${a} ${b}C${a} ${b + 22} ${c} ${d - 22} ${c} ${d}`;
  }
  const [a, b, c, d] = [x1 + WIDE, y1 + HIGH / 2, x2 - 1, y2 + HIGH / 2];
  if (c <= a) { // backwards: around below
    const low = Math.max(y1, y2) + HIGH + 9;
    return `M${x1 + WIDE / 2} ${y1 + HIGH}C${x1 + WIDE / 2} ${low} ${x1} ${low} ${(x1 + x2 + WIDE) / 2} ${low}S${x2 + WIDE / 2} ${low} ${x2 + WIDE / 2} ${y2 + HIGH + 2}`;
  }
  return `M${a} ${b}C${a + GAP_X / 2} ${b} ${c - GAP_X / 2} ${d} ${c} ${d}`;
}

const stateNow = (node) => { const found = live.byRef.get(node?.id); return found && node.state !== "waiting" ? STATES[stateOf(...found)] : node?.state; };
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function box(group, [x, y], roots, later) {
  const [node] = group.nodes;
  const found = live.byRef.get(node.id);
  const many = group.nodes.length > 1;
  const name = node.kind === "script" ? "the script" : many ? `${node.mesh} × ${number(group.nodes.length)}` : found ? rankName(found[0], node.rank) : node.label;
  const second = node.kind === "script" ? node.place.split(" at ")[0] : many ? `ranks ${ranges(group.nodes.map((each) => each.rank))}` : node.endpoint && `${node.endpoint}()`;
  const age = group.age ? seconds(group.age + later) : "";
  const lines = [cut(name, 28), cut(second || "", 34), `${stateNow(node)}${age && ` · ${age}`}`];
  const open = found && (() => change({ actor: actorKey(...found) }));
  return h("g", { class: `node s-${stateNow(node)}${group.nodes.some((each) => roots.has(each.id)) ? " root" : ""}`, transform: `translate(${x} ${y})`, tabindex: open ? 0 : null, role: open ? "button" : null, onclick: open, onkeydown: open && ((event) => { if (event.key === "Enter") open(); }) },
    h("title", null, [name, node.place].filter(Boolean).join("\n")),
    h("rect", { class: "box", width: WIDE, height: HIGH, rx: 6 }), h("rect", { class: "side", x: 0, y: 0, width: 5, height: HIGH, rx: 2 }),
    h("text", { class: "name", x: 16, y: 22 }, lines[0]), h("text", { x: 16, y: 39 }, lines[1]), h("text", { x: 16, y: 54 }, lines[2]));
}
