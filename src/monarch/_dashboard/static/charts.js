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

/**
 * Series over time with one scale: [{values, kind}], where kind is a class; `show` words a value.
 * The picture is stretched to its place, so its texts stand beside it and not in it.
 */
export function chart(series, { start, bucket, show, label, marks = [] }) {
  const [width, height, bottom] = [600, 132, 6];
  const count = series[0].values.length;
  const top = Math.max(1e-9, ...series.flatMap((each) => each.values.map((value) => value ?? 0)));
  const x = (i) => (i / Math.max(1, count - 1)) * width;
  const y = (value) => height - bottom - (value / top) * (height - bottom - 4);
  const lines = series.map(({ values, kind }) => {
    let path = "";
    let open = false;
    values.forEach((value, i) => {
      if (value === null) { open = false; return; }
      const alone = !open && (values[i + 1] ?? null) === null;
      path += `${open ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}${alone ? "h3" : ""}`;
      open = true;
    });
    const full = kind === "l1" && !values.includes(null);
    return [full && h("path", { class: "a1", d: `${path}L${width} ${y(0)}L0 ${y(0)}z` }), h("path", { class: kind, d: path, "vector-effect": "non-scaling-stroke" })];
  });
  return h("figure", { class: "chart", role: "img", "aria-label": `${label}; at most ${show(top)}` },
    h("figcaption", null, h("span", null, show(top))),
    h("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      [0, 0.5, 1].map((part) => h("path", { class: "rule", d: `M0 ${y(top * part)}H${width}`, "vector-effect": "non-scaling-stroke" })),
      lines, marks.map((value, i) => value > 0 && h("rect", { class: "fail", x: x(i) - 2, y: height - 5, width: 4, height: 5 }))),
    h("figcaption", null, h("span", null, clock(start)), marks.some((value) => value > 0) && h("span", { class: "bad" }, "▪ failures"), h("span", null, clock(start + bucket * count))));
}
