// The wait-for graph as a picture: equal waits are one box, a circle is marked, boxes stand in
// layers from those who wait to those for whom they wait. Pure: no document, no clock.

/** Join nodes that do the same and wait for the same: 64 trainers become one box. */
export function condense(nodes, edges) {
  const targets = new Map(nodes.map((node) => [node.id, []]));
  for (const edge of edges) targets.get(edge.from)?.push(edge.to);
  const rings = circles(nodes.map((node) => node.id), edges);
  const groups = new Map();
  const groupOf = new Map();
  for (const node of nodes) {
    const lone = node.kind === "script" || rings.has(node.id);
    const key = lone ? node.id : JSON.stringify([node.mesh, node.state, node.endpoint, node.kind, [...new Set(targets.get(node.id))].sort()]);
    const group = groups.get(key) ?? { key, nodes: [], age: 0, circle: rings.get(node.id) };
    group.nodes.push(node);
    group.age = Math.max(group.age, node.age ?? 0);
    groups.set(key, group);
    groupOf.set(node.id, group);
  }
  const links = new Map();
  for (const edge of edges) {
    const [from, to] = [groupOf.get(edge.from), groupOf.get(edge.to)];
    if (!from || !to) continue;
    const key = `${from.key}\n${to.key}`;
    const link = links.get(key) ?? { from, to, calls: new Set(), count: 0, seconds: 0, circle: from.circle !== undefined && from.circle === to.circle };
    link.calls.add(edge.call);
    link.count += 1;
    link.seconds = Math.max(link.seconds, edge.seconds ?? 0);
    links.set(key, link);
  }
  return { groups: [...groups.values()], links: [...links.values()] };
}

/** Nodes that stand on a circle, each with the number of its circle (Tarjan, without recursion). */
export function circles(ids, edges) {
  const next = new Map(ids.map((id) => [id, []]));
  const own = new Set();
  for (const { from, to } of edges) { if (next.has(to)) next.get(from)?.push(to); if (from === to) own.add(from); }
  const [index, low, on, stack, found] = [new Map(), new Map(), new Set(), [], new Map()];
  let number = 0;
  for (const start of ids) {
    if (index.has(start)) continue;
    const work = [[start, 0]];
    while (work.length) {
      const top = work.at(-1);
      const [id, place] = top;
      if (place === 0 && !index.has(id)) { index.set(id, index.size); low.set(id, index.get(id)); stack.push(id); on.add(id); }
      const following = next.get(id);
      if (place < following.length) {
        top[1] += 1;
        const to = following[place];
        if (!index.has(to)) work.push([to, 0]);
        else if (on.has(to)) low.set(id, Math.min(low.get(id), index.get(to)));
        continue;
      }
      work.pop();
      if (work.length) { const above = work.at(-1)[0]; low.set(above, Math.min(low.get(above), low.get(id))); }
      if (low.get(id) === index.get(id)) {
        const members = [];
        let member;
        do { member = stack.pop(); on.delete(member); members.push(member); } while (member !== id);
        if (members.length > 1 || own.has(id)) { for (const each of members) found.set(each, number); number += 1; }
      }
    }
  }
  return found;
}

/** Return the parts of the graph that are not joined, each as [groups, links]; circles first. */
export function parts(groups, links) {
  const home = new Map(groups.map((group) => [group, group]));
  const root = (group) => { while (home.get(group) !== group) group = home.get(group); return group; };
  for (const { from, to } of links) home.set(root(from), root(to));
  const found = new Map();
  for (const group of groups) { const key = root(group); found.set(key, [...(found.get(key) ?? []), group]); }
  return [...found.values()].map((own) => [own, links.filter((link) => own.includes(link.from))])
    .sort(([a], [b]) => b.length - a.length);
}

/** The members of a circle in the order of the waits, as far as they form one ring. */
function inOrder(ring, links) {
  const order = [];
  for (let at = ring[0]; at && !order.includes(at);) {
    order.push(at);
    const here = at;
    at = links.find((link) => link.circle && link.from === here && !order.includes(link.to))?.to;
  }
  return [...order, ...ring.filter((each) => !order.includes(each))];
}

/** Give each group a layer and a row: longest path from a group for which none waits. */
export function arrange(groups, links) {
  const layer = new Map(groups.map((group) => [group, 0]));
  const free = links.filter((link) => !link.circle);
  for (let round = 0; round < groups.length; round += 1) {
    let moved = false;
    for (const { from, to } of free) {
      if (layer.get(to) < layer.get(from) + 1) { layer.set(to, layer.get(from) + 1); moved = true; }
    }
    if (!moved) break;
  }
  for (const group of groups) if (group.circle !== undefined) {
    const ring = inOrder(groups.filter((each) => each.circle === group.circle), links);
    const first = Math.max(...ring.map((each) => layer.get(each) - (each.step ?? 0)));
    ring.forEach((each, place) => { if (each.step === undefined) each.step = place; layer.set(each, first + each.step); });
  }
  const rows = [];
  for (const group of groups) (rows[layer.get(group)] ??= []).push(group);
  const layers = rows.filter(Boolean);
  const place = new Map();
  const number = () => layers.forEach((row) => row.forEach((group, at) => place.set(group, at)));
  number();
  for (let sweep = 0; sweep < 4; sweep += 1) {
    for (const row of sweep % 2 ? [...layers].reverse() : layers) {
      const weight = new Map(row.map((group) => {
        const near = links.filter((link) => (sweep % 2 ? link.from : link.to) === group).map((link) => place.get(sweep % 2 ? link.to : link.from));
        return [group, near.length ? near.reduce((a, b) => a + b) / near.length : place.get(group)];
      }));
      row.sort((a, b) => weight.get(a) - weight.get(b));
      number();
    }
  }
  return layers;
}
