// The heat grid of one mesh: a canvas with one cell for each rank, grouped by the innermost
// dimension. Colour is the state, depth of colour the age of the call, and a mark on the cell says
// the same as the colour for states that need attention.

import { h } from "./dom.js";
import { STATES, ageOf, live, stateOf } from "./state.js";
import { plural, rankName, seconds } from "./format.js";

const SIZES = [26, 22, 18, 15, 12, 10, 8, 6, 5];
const HIGHEST = 560; // pixels, before cells get smaller

let palette = null;
/** Read the colours of the theme; called when it changes. */
export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const card = rgb(of("card"));
  const mix = (colour, part) => `rgb(${rgb(colour).map((value, i) => Math.round(value * part + card[i] * (1 - part))).join(" ")})`;
  palette = {
    flat: STATES.map((state) => of(state)), mark: of("card"), ink: of("ink"), accent: of("accent"),
    busy: Array.from({ length: 9 }, (_, i) => mix(of("busy"), 0.32 + 0.085 * i)),
    waiting: Array.from({ length: 9 }, (_, i) => mix(of("waiting"), 0.32 + 0.085 * i)),
  };
}

/** 0 to 8 for ages from a tenth of a second to a thousand seconds. */
const depth = (age) => Math.max(0, Math.min(8, Math.round((Math.log10(Math.max(0.1, age ?? 0)) + 1) * 2)));

export class Grid {
  constructor(mesh, open, tip, say) {
    this.mesh = mesh;
    this.open = open;
    this.tip = tip;
    this.say = say;
    this.cursor = -1;
    this.only = null; // the one state that is not faded
    this.canvas = h("canvas", {
      tabindex: 0, role: "application", "aria-label": `Ranks of ${mesh.name}. Arrow keys move, Enter opens, n goes to the next one in trouble.`,
      onpointermove: (event) => this.hover(event), onpointerleave: () => this.leave(),
      onclick: (event) => { const i = this.at(event); if (i >= 0) { this.cursor = i; this.open(this.mesh, i); } },
      onkeydown: (event) => this.key(event), onfocus: () => this.draw(), onblur: () => { this.draw(); this.tip(null); },
    });
    this.element = h("div", { class: "heat" }, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  layout(width) {
    const { count, sizes } = this.mesh;
    const inner = sizes.length > 1 && sizes.at(-1) <= 32 ? sizes.at(-1) : 0;
    let found;
    for (const size of SIZES) {
      const gap = size > 8 ? 2 : 1;
      const pitch = size + gap;
      const between = inner ? Math.max(3, Math.round(size / 3)) : 0;
      const block = inner ? inner * pitch + between : pitch;
      const across = Math.max(1, Math.floor((width + between + gap) / block));
      const blocks = Math.ceil(count / (inner || 1));
      const rows = Math.ceil(blocks / across);
      found = { size, gap, pitch, inner: inner || 1, between, block, across, rows, height: rows * (pitch + (inner && size > 8 ? 2 : 0)), line: pitch + (inner && size > 8 ? 2 : 0) };
      if (found.height <= HIGHEST && block - between <= width + gap) break;
    }
    if (found.inner > 1 && found.block - found.between > width + found.gap) return { ...found, inner: 1, between: 0, block: found.pitch, across: Math.floor((width + found.gap) / found.pitch), line: found.pitch, height: Math.ceil(count / Math.floor((width + found.gap) / found.pitch)) * found.pitch };
    return found;
  }

  place(i) {
    const { inner, across, block, pitch, line } = this.shape;
    const group = Math.floor(i / inner);
    return [(group % across) * block + (i % inner) * pitch, Math.floor(group / across) * line];
  }

  at(event) {
    if (!this.shape) return -1;
    const box = this.canvas.getBoundingClientRect();
    const { inner, across, block, pitch, line } = this.shape;
    const column = Math.floor((event.clientX - box.left) / block);
    const within = Math.floor(((event.clientX - box.left) % block) / pitch);
    if (column >= across || within >= inner) return -1;
    const i = (Math.floor((event.clientY - box.top) / line) * across + column) * inner + within;
    return i >= 0 && i < this.mesh.count ? i : -1;
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width || !this.element.isConnected) return;
    if (!palette) readColours();
    const shape = (this.shape = this.layout(width));
    const ratio = devicePixelRatio || 1;
    const high = Math.max(shape.size + 4, Math.ceil(shape.height));
    const canvas = this.canvas;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(high * ratio);
      canvas.style.height = `${high}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, high);
    const { mesh } = this;
    const radius = shape.size >= 12 ? 2.5 : 0;
    for (let i = 0; i < mesh.count; i += 1) {
      const [x, y] = this.place(i);
      const state = stateOf(mesh, i);
      context.globalAlpha = this.only !== null && this.only !== state ? 0.14 : 1;
      context.fillStyle = state === 1 || state === 2 ? palette[STATES[state]][depth(ageOf(mesh, i))] : palette.flat[state];
      if (radius) { context.beginPath(); context.roundRect(x, y, shape.size, shape.size, radius); context.fill(); } else context.fillRect(x, y, shape.size, shape.size);
      if (shape.size >= 10 && state >= 3 && state <= 7) this.mark(context, state, x, y, shape.size);
    }
    context.globalAlpha = 1;
    if (this.cursor >= 0 && this.cursor < mesh.count && (document.activeElement === canvas || this.chosen)) {
      const [x, y] = this.place(this.cursor);
      context.lineWidth = 2;
      context.strokeStyle = palette.ink;
      context.strokeRect(x - 0.5, y - 0.5, shape.size + 1, shape.size + 1);
    }
  }

  /** A cross for failed, a slash for silent, a bar for stuck, a ring for starting, a dash for stopped. */
  mark(context, state, x, y, size) {
    const a = size * 0.3;
    const b = size * 0.7;
    const middle = size / 2;
    context.strokeStyle = palette.mark;
    context.lineWidth = Math.max(1.4, size / 11);
    context.beginPath();
    if (state === 5 || state === 4) { context.moveTo(x + a, y + b); context.lineTo(x + b, y + a); }
    if (state === 5) { context.moveTo(x + a, y + a); context.lineTo(x + b, y + b); }
    if (state === 3) { context.moveTo(x + middle, y + a * 0.8); context.lineTo(x + middle, y + size * 0.58); context.moveTo(x + middle, y + size * 0.7); context.lineTo(x + middle, y + size * 0.78); }
    if (state === 7) context.arc(x + middle, y + middle, size * 0.2, 0, 7);
    if (state === 6) { context.moveTo(x + a, y + middle); context.lineTo(x + b, y + middle); }
    context.stroke();
  }

  describe(i) {
    const { mesh } = this;
    const state = STATES[stateOf(mesh, i)];
    const age = seconds(ageOf(mesh, i));
    const call = mesh.endpoint[i] ? `${state} in ${mesh.endpoint[i]}()${age && ` for ${age}`}` : state;
    return { name: rankName(mesh, mesh.rank[i]), lines: [call, mesh.place[i], mesh.queued[i] ? `${plural(mesh.queued[i], "message")} queued` : ""].filter(Boolean), state };
  }

  hover(event) {
    const i = this.at(event);
    this.tip(i < 0 ? null : this.describe(i), event.clientX, event.clientY);
  }

  leave() { this.tip(null); }

  key(event) {
    const { count } = this.mesh;
    const row = this.shape ? this.shape.across * this.shape.inner : 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -count, End: count }[event.key];
    if (event.key === "Enter" && this.cursor >= 0) this.open(this.mesh, this.cursor);
    else if (event.key === "n") {
      for (let k = 1; k <= count; k += 1) {
        const i = (this.cursor + k + count) % count;
        if ([3, 4, 5].includes(stateOf(this.mesh, i))) { this.cursor = i; break; }
      }
      this.show();
    } else if (step) {
      this.cursor = this.cursor < 0 ? 0 : Math.max(0, Math.min(count - 1, this.cursor + step));
      this.show();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  show() {
    if (this.cursor < 0 || !this.shape) return;
    const { name, lines, state } = this.describe(this.cursor);
    this.say(`${name}: ${lines.join(", ")}`);
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = this.place(this.cursor);
    this.tip({ name, lines, state }, box.left + x + this.shape.size, box.top + y + this.shape.size);
    this.draw();
  }
}

export const actorAt = (text) => {
  const at = text.lastIndexOf(":");
  const mesh = live.meshes.find((each) => each.key === text.slice(0, at));
  const rank = Number(text.slice(at + 1));
  const i = mesh ? mesh.rank.indexOf(rank) : -1;
  return i < 0 ? null : [mesh, i];
};
export const actorKey = (mesh, i) => `${mesh.key}:${mesh.rank[i]}`;
