// Meshes: a grid of ranks for each, coloured by state; the fuller the colour, the longer it lasts.

import { count, h, replace, seconds } from "./dom.js";
import { STATES, nameOf, place, state } from "./state.js";

const GAP = 2;

export function meshes(page, { open, parameter, set }) {
  const list = h("div", { class: "meshes" });
  const search = h("input", { type: "search", placeholder: "mesh or actor", "aria-label": "Filter meshes", value: parameter("find") || "", oninput: () => set({ find: search.value || null }, true) });
  const system = h("input", { type: "checkbox", id: "system", onchange: () => draw() });
  replace(page, h("div", { class: "bar" }, h("h1", {}, "Meshes"), search, h("label", { for: "system" }, system, " system actors")), legend(), list);
  const grids = new Map();

  function draw() {
    const wanted = search.value.toLowerCase();
    const ranks = new Map();
    for (const actor of state.actors.values()) {
      if (!ranks.has(actor.mesh)) ranks.set(actor.mesh, []);
      ranks.get(actor.mesh).push(actor);
    }
    const shown = [...state.meshes.values()].filter((mesh) => (system.checked || !mesh.system) && (!wanted || mesh.name.toLowerCase().includes(wanted) || mesh.class.toLowerCase().includes(wanted)));
    for (const [id, grid] of grids) if (!shown.some((mesh) => mesh.id === id)) { grid.element.remove(); grids.delete(id); }
    for (const mesh of shown) {
      if (!grids.has(mesh.id)) { const grid = new Grid(mesh, open); grids.set(mesh.id, grid); list.append(grid.element); }
      grids.get(mesh.id).show(mesh, (ranks.get(mesh.id) || []).sort((a, b) => a.rank - b.rank));
    }
    list.querySelector(".empty")?.remove();
    if (!shown.length) list.append(h("p", { class: "empty" }, state.connected ? "No actors yet." : "Waiting for the job."));
  }

  const resized = () => grids.forEach((grid) => grid.paint());
  addEventListener("resize", resized);
  draw();
  return { change: (kind) => (kind === "actors" ? draw() : kind === "tick" && grids.forEach((grid) => grid.paint())), end: () => removeEventListener("resize", resized) };
}

function legend() {
  return h("ul", { class: "legend", "aria-label": "Colours" }, STATES.map((name) => h("li", {}, h("i", { class: `dot ${name}` }), name)));
}

class Grid {
  constructor(mesh, open) {
    this.open = open;
    this.actors = [];
    this.at = 0;
    this.hint = h("span", { class: "hint", "aria-live": "polite" });
    this.counts = h("span", { class: "counts" });
    this.canvas = h("canvas", {
      tabindex: "0", role: "application",
      onmousemove: (event) => this.point(this.under(event)),
      onmouseleave: () => this.point(-1),
      onclick: (event) => { const found = this.under(event); if (found >= 0) this.open(this.actors[found].ref); },
      onkeydown: (event) => this.key(event),
      onfocus: () => this.point(this.at),
    });
    this.title = h("h2", {});
    this.element = h("section", { class: "mesh" }, h("div", { class: "head" }, this.title, this.counts, this.hint), this.canvas);
    this.mesh = mesh;
    this.pointed = -1;
  }

  show(mesh, actors) {
    this.mesh = mesh;
    this.actors = actors;
    const size = mesh.sizes.length ? mesh.labels.map((label, axis) => `${label}=${mesh.sizes[axis]}`).join(" × ") : "1 actor";
    replace(this.title, mesh.name, h("small", {}, ` ${mesh.class} · ${size}`));
    const counts = {};
    for (const actor of actors) counts[actor.state] = (counts[actor.state] || 0) + 1;
    replace(this.counts, STATES.filter((name) => counts[name]).map((name) => h("span", { class: "count" }, h("i", { class: `dot ${name}` }), `${count(counts[name])} ${name}`)));
    this.canvas.setAttribute("aria-label", `${mesh.name}: ${STATES.filter((name) => counts[name]).map((name) => `${counts[name]} ${name}`).join(", ")}. Arrow keys move, Enter opens.`);
    this.paint();
  }

  paint() {
    const width = Math.max(40, this.element.clientWidth - 24);
    const total = this.actors.length;
    const last = this.mesh.sizes.length > 1 ? this.mesh.sizes[this.mesh.sizes.length - 1] : 0;
    this.cell = total > 2000 ? 7 : total > 400 ? 12 : total > 64 ? 18 : 26;
    let columns = Math.max(1, Math.floor((width + GAP) / (this.cell + GAP)));
    if (last && last <= columns) columns -= columns % last;
    this.columns = Math.min(columns, Math.max(1, total));
    const rows = Math.ceil(total / this.columns);
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [this.columns * (this.cell + GAP), rows * (this.cell + GAP)];
    if (this.canvas.width !== Math.round(wide * ratio) || this.canvas.height !== Math.round(high * ratio)) {
      this.canvas.width = Math.round(wide * ratio);
      this.canvas.height = Math.round(high * ratio);
      this.canvas.style.width = `${wide}px`;
      this.canvas.style.height = `${high}px`;
    }
    const style = getComputedStyle(document.documentElement);
    const colour = Object.fromEntries(STATES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const draw = this.canvas.getContext("2d");
    draw.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw.clearRect(0, 0, wide, high);
    this.actors.forEach((actor, index) => {
      const [x, y] = this.spot(index);
      const age = state.age(actor);
      const lasting = actor.state === "busy" || actor.state === "waiting";
      draw.globalAlpha = lasting ? Math.min(1, 0.45 + Math.log10(1 + (age || 0)) / 2.5) : 1;
      draw.fillStyle = colour[actor.state] || colour.idle;
      draw.fillRect(x, y, this.cell, this.cell);
      if (index === this.pointed) {
        draw.globalAlpha = 1;
        draw.strokeStyle = style.getPropertyValue("--text");
        draw.lineWidth = 2;
        draw.strokeRect(x + 1, y + 1, this.cell - 2, this.cell - 2);
      }
    });
    draw.globalAlpha = 1;
  }

  spot(index) {
    return [(index % this.columns) * (this.cell + GAP), Math.floor(index / this.columns) * (this.cell + GAP)];
  }

  under(event) {
    const column = Math.floor(event.offsetX / (this.cell + GAP));
    const found = Math.floor(event.offsetY / (this.cell + GAP)) * this.columns + column;
    return column < this.columns && found < this.actors.length ? found : -1;
  }

  point(index) {
    if (index === this.pointed) return;
    this.pointed = index;
    const actor = this.actors[index];
    this.canvas.style.cursor = actor ? "pointer" : "default";
    const doing = actor && [actor.endpoint && `${actor.endpoint}()`, seconds(state.age(actor)), actor.place].filter(Boolean).join(" · ");
    replace(this.hint, actor ? `${this.mesh.labels.length ? place(this.mesh, actor.rank) : nameOf(actor)}: ${actor.state}${doing ? ` · ${doing}` : ""}` : "");
    if (actor) this.at = index;
    this.paint();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (step) {
      event.preventDefault();
      this.point(Math.min(this.actors.length - 1, Math.max(0, this.at + step)));
    } else if (event.key === "Enter" && this.actors[this.at]) this.open(this.actors[this.at].ref);
  }
}
