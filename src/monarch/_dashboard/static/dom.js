// Elements from data. Text becomes text nodes, and there is no innerHTML in these files: names and
// log lines of a job are never read as HTML. `morph` changes the page in place, so that focus,
// selection, scroll positions and open <details> survive an update.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "rect", "text", "circle", "line", "defs", "marker", "title", "polyline"]);
const PROPERTIES = new Set(["value", "checked", "disabled"]);

/** Return an element. Attributes that are null or false are left out; `on*` are listeners. */
export function h(tag, attributes, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  element.listeners = {};
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element[name] = element.listeners[name] = value;
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (name === "key") element.key = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false)
    .map((each) => (each instanceof Node ? each : document.createTextNode(String(each)))));
  return element;
}

/** Stand for an element that stays the same in all updates, such as a canvas. */
export function hold(element) {
  const place = h("i", { "data-hold": true });
  place.real = element;
  element.held = true;
  return place;
}

/** Change the children of `parent` to these, reusing elements of the same tag and key. */
export function morph(parent, ...children) {
  const wanted = h("div", null, ...children).childNodes;
  align(parent, [...wanted]);
}

function align(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.key) keyed.set(child.key, child);
  let at = parent.firstChild;
  for (const next of wanted) {
    if (next.real) {
      if (next.real === at) at = at.nextSibling;
      else parent.insertBefore(next.real, at);
      continue;
    }
    let old = next.key ? keyed.get(next.key) : at;
    if (old && !next.key && old.key) old = null;
    if (old && same(old, next)) {
      if (old === at) at = at.nextSibling;
      else parent.insertBefore(old, at);
      patch(old, next);
    } else {
      parent.insertBefore(next, at);
      for (const place of next.querySelectorAll?.("[data-hold]") ?? []) place.replaceWith(place.real);
    }
  }
  while (at) {
    const following = at.nextSibling;
    at.remove();
    at = following;
  }
}

const same = (a, b) => !a.held && a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.key === b.key;

function patch(old, next) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    const own = name === "open" && old.nodeName === "DETAILS";
    if (!own && !next.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (name === "open" && old.nodeName === "DETAILS") continue;
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name of Object.keys(old.listeners ?? {})) if (!next.listeners[name]) old[name] = null;
  for (const [name, value] of Object.entries(next.listeners ?? {})) old[name] = value;
  old.listeners = next.listeners;
  align(old, [...next.childNodes]);
  for (const name of ["checked", "disabled"]) if (name in next && old[name] !== next[name]) old[name] = next[name];
  const form = ["INPUT", "TEXTAREA", "SELECT"].includes(old.nodeName);
  if (form && old !== document.activeElement && old.value !== next.value) old.value = next.value;
}
