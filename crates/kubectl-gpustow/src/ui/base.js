// What every part of the page needs: elements, amounts, colours, the order of names.

export const $ = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function memory(mib) {
  if (mib === 0) return "0";
  if (mib < 1024) return `${mib} MiB`;
  const gib = mib / 1024;
  return gib < 1024 ? `${Number(gib.toFixed(1))} GiB` : `${Number((gib / 1024).toFixed(1))} TiB`;
}

export function age(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export const percent = (part, whole) => `${Math.min(100, (100 * part) / Math.max(1, whole))}%`;

// gpu-2 comes before gpu-10.
const collator = new Intl.Collator("en", { numeric: true });
export const natural = (a, b) => collator.compare(a, b);

// Each namespace has a colour as long as there are some left, and keeps it; the rest share the last.
// The name is always there as well.
const COLOURS = 8;
const given = new Map();

export function colour(namespace) {
  if (!given.has(namespace)) given.set(namespace, Math.min(given.size, COLOURS));
  return `c${given.get(namespace)}`;
}

export function isBad(data) {
  return data.state !== "" || data.gpus.some((gpu) => gpu.sick);
}

function borrowed(gpu) {
  const amount = gpu.borrowed ? ` Borrowed: ${memory(gpu.borrowed)}` : "";
  const from = gpu.reclaimedFrom.length ? `, reclaimed from ${gpu.reclaimedFrom.join(", ")}` : "";
  const reserved = gpu.reservations.length ? ` Reserved for ${gpu.reservations.join(", ")}.` : "";
  return `${amount}${from}${amount && "."}${reserved}`;
}

// What a pod requests of a GPU, uses there, and should request.
export function ofPod(held, used, advised) {
  return `${memory(held)} requested` + (used === null ? "" : `, ${memory(used)} in use`) +
    (advised === null ? "" : `, ${memory(advised)} advised`);
}

export function describe(gpu) {
  const pods = gpu.pods.map(([name, ...amounts]) => `${name} ${ofPod(...amounts)}`).join(", ");
  const others = gpu.others.length ? ` (${gpu.others.join(", ")})` : "";
  const unmanaged = gpu.unmanaged ? `, outside gpustow pods ${memory(gpu.unmanaged)}${others}` : "";
  const sick = gpu.sick ? `, takes no pods: ${gpu.sick}` : "";
  return `GPU ${gpu.gpu}, ${gpu.model}: ${memory(gpu.held)} of ${memory(gpu.capacity)} requested, ` +
    `${memory(gpu.used)} in use, available ${memory(gpu.available)}${unmanaged}${sick}. ${pods || "No pods"}. ` +
    `Memory limits: ${gpu.noLimit ?? "hold"}.${borrowed(gpu)}`;
}
