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

// A namespace's colour follows from its name: the same for everybody, every day. Of two that would have the same, the
// later in the alphabet takes the next. The name is always there as well.
const HUES = 12;
let slots = new Map();

function hash(name) {
  let hash = 2166136261;
  for (const sign of name) hash = Math.imul(hash ^ sign.codePointAt(0), 16777619) >>> 0;
  return hash % HUES;
}

export function colourAll(namespaces) {
  slots = new Map();
  const taken = new Set();
  for (const name of [...namespaces].sort()) {
    let slot = hash(name);
    while (taken.size < HUES && taken.has(slot)) slot = (slot + 1) % HUES;
    taken.add(slot);
    slots.set(name, slot);
  }
}

export function colour(namespace) {
  const slot = slots.get(namespace) ?? hash(namespace);
  return `hsl(${(slot * 360) / HUES} 75% ${slot % 2 ? 70 : 82}%)`;
}

// The first words of a reason: "GPU has fallen off the bus" of "NVML's error 15 (GPU has fallen off the bus or is …)".
export const short = (reason) => (reason.match(/\((.+)\)/)?.[1] ?? reason).split(/ or |;/, 1)[0];

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

// The pods of a GPU by workload, each as { name, label, pods, amounts }.
export function workloads(gpu) {
  const groups = new Map();
  for (const pod of gpu.pods) {
    const [name, , , , owner] = pod;
    const [namespace, own] = name.split("/", 2);
    const key = `${namespace}/${owner ?? own}`;
    if (!groups.has(key)) groups.set(key, { label: owner ?? own, namespace, pods: [] });
    groups.get(key).pods.push(pod);
  }
  for (const group of groups.values()) {
    const { pods } = group;
    const sum = (at) => pods.reduce((sum, pod) => (sum === null || pod[at] === null ? null : sum + pod[at]), 0);
    group.amounts = [sum(1), sum(2), sum(3)];
    group.name = pods.length === 1 ? pods[0][0] : `${group.namespace}/${group.label} ×${pods.length}`;
    if (pods.length > 1) group.label += ` ×${pods.length}`;
  }
  return [...groups.values()];
}

export function describe(gpu) {
  const pods = gpu.pods.map(([name, held, used, advised]) => `${name} ${ofPod(held, used, advised)}`).join(", ");
  const others = gpu.others.length ? ` (${gpu.others.join(", ")})` : "";
  const unmanaged = gpu.unmanaged ? `, outside gpustow pods ${memory(gpu.unmanaged)}${others}` : "";
  const busy = gpu.busy === null ? "" : `, busy ${gpu.busy} % of the time`;
  const starting = gpu.starting.length ? `, starting: ${gpu.starting.join(", ")}` : "";
  const sick = gpu.sick ? `, takes no pods: ${gpu.sick}` : "";
  return `GPU ${gpu.gpu}, ${gpu.model}: ${memory(gpu.held)} of ${memory(gpu.capacity)} requested, ` +
    `${memory(gpu.used)} in use, available ${memory(gpu.available)}${busy}${unmanaged}${starting}${sick}. ${pods || "No pods"}. ` +
    `Memory limits: ${gpu.noLimit ?? "hold"}.${borrowed(gpu)}`;
}
