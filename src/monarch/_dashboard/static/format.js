// Numbers, times and names as people read them.

/** 0.4 s, 12 s, 3 min 12 s, 2 h 5 min; "" if not known. */
export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 9.95) return `${Math.max(0, value).toFixed(1)} s`;
  if (value < 60) return `${Math.floor(value)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function micros(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${Math.round(value)} µs`;
  if (value < 1e6) return `${digits(value / 1e3)} ms`;
  return value < 120e6 ? `${digits(value / 1e6)} s` : seconds(value / 1e6);
}

const digits = (value) => value.toFixed(value < 9.95 ? 1 : 0);

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const place = Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const amount = value / 1024 ** place;
  return `${amount.toFixed(amount < 10 && place > 2 ? 1 : 0)} ${units[place]}`;
}

export const number = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));
export const rate = (value) => (value === null || value === undefined ? "–" : value >= 100 ? number(Math.round(value)) : value.toFixed(value < 1 ? 2 : 1));
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value)} %`);
export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The time of day. */
export function clock(us, fine = false) {
  const text = new Date(us / 1000).toTimeString().slice(0, 8);
  return fine ? `${text}.${String(Math.floor(us / 1000) % 1000).padStart(3, "0")}` : text;
}

/** `trainers[hosts=0,gpus=1]`: the rank by the dimensions of its mesh. */
export function rankName(mesh, rank) {
  if (!mesh.sizes?.length) return mesh.count > 1 ? `${mesh.name}[${rank}]` : mesh.name;
  let rest = rank;
  const parts = [];
  for (let place = mesh.sizes.length - 1; place >= 0; place -= 1) {
    parts.unshift(`${mesh.labels[place] ?? "dim"}=${rest % mesh.sizes[place]}`);
    rest = Math.floor(rest / mesh.sizes[place]);
  }
  return rest ? `${mesh.name}[${rank}]` : `${mesh.name}[${parts.join(",")}]`;
}

export const shapeName = (mesh) => (mesh.sizes?.length ? mesh.sizes.map((size, place) => `${mesh.labels[place]}: ${number(size)}`).join(" × ") : "1 actor");

/** "0-3, 7" from numbers. */
export function ranges(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] <= sorted[j] + 1) j += 1;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}-${sorted[j]}`);
    i = j + 1;
  }
  return parts.length > 12 ? `${parts.slice(0, 12).join(", ")}, …` : parts.join(", ");
}
