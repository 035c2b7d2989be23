// A heat grid of ranks for each mesh of actors.

import { h, hold, morph } from "../dom.js";
import { Grid, actorAt, actorKey } from "../grid.js";
import { STATES, counts, live } from "../state.js";
import { plural, shapeName } from "../format.js";
import { change, route } from "../route.js";
import { countLinks, search } from "../parts.js";

export const title = "Meshes";
const SMALL = 16; // actors; such meshes stand side by side

export function mount(root, { tip, say }) {
  const grids = new Map();
  const open = (mesh, i) => change({ actor: actorKey(mesh, i) });

  function render() {
    const { params } = route();
    const text = (params.mesh ?? "").toLowerCase();
    const shown = live.meshes.filter((mesh) => (params.system === "1" || !mesh.system) && mesh.name.toLowerCase().includes(text));
    const only = STATES.indexOf(params.state);
    const hidden = live.meshes.filter((mesh) => mesh.system).length;
    const chosen = params.actor ? actorAt(params.actor) : null;
    const card = (mesh) => {
      let grid = grids.get(mesh.id);
      if (!grid) grids.set(mesh.id, (grid = new Grid(mesh, open, tip, say)));
      grid.mesh = mesh;
      grid.only = only < 0 ? null : only;
      grid.chosen = chosen?.[0] === mesh;
      if (grid.chosen) grid.cursor = chosen[1];
      return h("section", { class: "card", key: mesh.id, "aria-label": mesh.name },
        h("div", { class: "top" }, h("h2", { class: "mono" }, mesh.name), h("span", { class: "note" }, `${mesh.class} · ${shapeName(mesh)}`), countLinks(counts([mesh]), mesh.name)),
        hold(grid.element));
    };
    for (const id of grids.keys()) if (!live.byId.has(id)) grids.delete(id);
    morph(root,
      h("div", { class: "title" }, h("h1", null, "Meshes"),
        h("p", null, live.loaded ? `${plural(shown.length, "mesh").replace("meshs", "meshes")}, ${plural(shown.reduce((sum, mesh) => sum + mesh.count, 0), "actor")}` : "Loading…"),
        h("div", { class: "bar" }, h("span", { class: "ramp note" }, "in a call for 0.1 s", h("i"), "15 min"), search("mesh", "Filter by name"),
          hidden > 0 && h("button", { "aria-pressed": String(params.system === "1"), onclick: () => change({ system: params.system === "1" ? "" : "1" }) }, "System actors"))),
      shown.filter((mesh) => mesh.count > SMALL).map(card),
      h("div", { class: "small", key: "small" }, shown.filter((mesh) => mesh.count <= SMALL).map(card)),
      live.loaded && !shown.length && h("div", { class: "card empty" }, text ? "No mesh has this name." : "There are no actors yet. Meshes appear here when the script spawns them."));
    for (const mesh of shown) grids.get(mesh.id)?.draw();
  }
  return { render, kinds: ["meshes", "actors", "tick", "theme"] };
}
