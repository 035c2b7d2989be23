// Small charts in SVG.

import { h } from "./dom.js";
import { clock } from "./format.js";

/** A line of numbers, without axes; nulls are gaps. */
export function spark(values, width = 110, height = 22) {
  const top = Math.max(...values.map((value) => value ?? 0), 1e-9);
  const points = values.map((value, i) => [(i / Math.max(1, values.length - 1)) * width, height - 2 - ((value ?? 0) / top) * (height - 4)]);
  const line = `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
  return h("svg", { width, height, "aria-hidden": "true" }, h("path", { class: "spark-area", d: `${line}L${width} ${height}L0 ${height}z` }), h("path", { class: "spark", d: line }));
}

/** Series over time with one scale: [{values, kind}], where kind is a class; `show` words a value. */
export function chart(series, { start, bucket, show, label, marks = [] }) {
  const [width, height, left, right, bottom] = [600, 150, 4, 4, 18];
  const count = series[0].values.length;
  const top = Math.max(1e-9, ...series.flatMap((each) => each.values.map((value) => value ?? 0)));
  const x = (i) => left + (i / Math.max(1, count - 1)) * (width - left - right);
  const y = (value) => height - bottom - (value / (top * 1.12)) * (height - bottom - 6);
  const lines = series.map(({ values, kind }) => {
    let path = "";
    let open = false;
    values.forEach((value, i) => { if (value === null) { open = false; return; } path += `${open ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`; open = true; });
    return [kind === "l1" && !values.includes(null) && h("path", { class: "a1", d: `${path}L${x(count - 1)} ${y(0)}L${x(0)} ${y(0)}z` }), h("path", { class: kind, d: path })];
  });
  return h("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}; at most ${show(top)}` },
    [0, 0.5, 1].map((part) => h("path", { class: "rule", d: `M${left} ${y(top * part)}H${width - right}`, "vector-effect": "non-scaling-stroke" })),
    lines, marks.map((value, i) => value > 0 && h("rect", { class: "fail", x: x(i) - 1.5, y: height - bottom + 1, width: 3, height: 4 })),
    h("text", { x: left, y: y(top) - 3 }, show(top)), h("text", { x: left, y: height - 4 }, clock(start)), h("text", { x: width - right, y: height - 4, "text-anchor": "end" }, clock(start + bucket * count)));
}
