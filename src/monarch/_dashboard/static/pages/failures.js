// Failures, equal ones together: the error, the lines of the user's program, the ranks.

import { h, morph } from "../dom.js";
import { live, now } from "../state.js";
import { clock, number, plural, rankName, seconds } from "../format.js";
import { address, route } from "../route.js";
import { actorKey } from "../grid.js";
import { search } from "../parts.js";
import { frames } from "../drawer.js";

export const title = "Failures";

export function mount(root) {
  function render() {
    const found = live.failures;
    if (!found) { morph(root, h("h1", null, "Failures"), h("div", { class: "card empty" }, "Loading…")); return; }
    const text = (route().params.text ?? "").toLowerCase();
    const groups = found.groups.filter((group) => `${group.error} ${group.mesh} ${group.traceback}`.toLowerCase().includes(text));
    const clean = !found.groups.length && !found.silent.length && !found.lost_hosts.length;
    morph(root,
      h("div", { class: "title" }, h("h1", null, "Failures"), h("p", null, clean ? "" : `${plural(found.groups.length, "cause")}, the latest first`), h("div", { class: "bar" }, search("text", "Filter by text"))),
      found.lost_hosts.length > 0 && h("div", { class: "card" }, h("h2", { class: "bad" }, `${plural(found.lost_hosts.length, "host")} lost`), h("p", { class: "mono" }, found.lost_hosts.join(", "))),
      found.silent.map((each) => h("div", { class: "card", key: `silent-${each.proc}` }, h("h2", null, `The process with pid ${each.pid} on ${each.host} does not answer`), h("p", { class: "note" }, each.text))),
      groups.map((group, i) => h("details", { class: "card failure", key: group.mesh + group.error, open: i === 0 },
        h("summary", null, h("div", null,
          h("div", { class: "what bad" }, group.error.split("\n")[0]),
          h("div", { class: "note" }, group.ranks ? [h("b", null, plural(group.count, "actor")), ` of ${group.mesh} (ranks ${group.ranks})`] : group.mesh, group.endpoint && ` in ${group.endpoint}()`, ` · ${seconds(now() - group.last_us / 1e6)} ago, at ${clock(group.last_us)}`, group.propagated && " · caused by another failure"))),
        h("div", { class: "body" },
          group.frames.length > 0 && frames(group),
          group.cause && h("p", { class: "note" }, "Cause: ", group.cause),
          group.actors.length > 0 && h("div", { class: "chips" }, group.actors.slice(0, 40).map((actor) => { const at = live.byRef.get(actor.ref); return h("a", { href: at ? address("failures", { ...route().params, actor: actorKey(...at) }) : null }, at ? rankName(at[0], at[0].rank[at[1]]) : actor.name); }), group.actors.length > 40 && `and ${number(group.actors.length - 40)} more`),
          h("details", null, h("summary", null, "Traceback"), h("pre", { class: "text" }, group.traceback))))),
      clean && h("div", { class: "card empty" }, "Nothing has failed."),
      !clean && text && !groups.length && h("div", { class: "card empty" }, "No failure has this text."));
  }
  return { render, kinds: ["failures", "meshes", "tick"] };
}
