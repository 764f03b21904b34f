// The page: one stream of events, one picture of the cluster, text only. Memory comes in MiB.

import { $, age, colour, colourAll, describe, isBad, make, memory, natural, ofPod, percent, short, workloads } from "./base.js";
import * as overview from "./overview.js";
import { drawTable, drawTeams, drawWaiting, firstPage, nothing } from "./tabs.js";

const nodes = new Map(); // name -> { name, data, search, element, filled, open }
let order = []; // the nodes as they are sorted
let blocks = []; // { element, nodes }
const BLOCK = 50;
let rest = { waiting: [], teams: [] };
let tab = "gpus";
const TABS = ["gpus", "table", "waiting", "teams"];

function bar(gpu) {
  const bar = make("div", "bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", describe(gpu));
  const requests = make("div", "requests");
  for (const { name, namespace, label, pods, amounts } of workloads(gpu)) {
    const [held, used, advised] = amounts;
    if (!held) continue;
    const segment = make("span", "", label);
    segment.style.width = percent(held, gpu.total);
    segment.style.background = colour(namespace);
    const each = pods.length > 1 ? `\n${pods.map(([pod, held, used, advised]) => `${pod}: ${ofPod(held, used, advised)}`).join("\n")}` : "";
    segment.title = `${name}: ${ofPod(held, used, advised)}${each}`;
    for (const [kind, amount] of [["used", used], ["advised", advised]]) {
      if (amount === null) continue;
      const mark = make("i", kind);
      mark.style.left = percent(amount, held);
      segment.append(mark);
    }
    requests.append(segment);
  }
  if (gpu.unmanaged) {
    const unmanaged = make("span", "unmanaged");
    unmanaged.style.width = percent(gpu.unmanaged, gpu.total);
    unmanaged.title = `outside gpustow pods: ${[memory(gpu.unmanaged), ...gpu.others].join(", ")}`;
    requests.append(unmanaged);
  }
  const reserved = make("span", "reserved");
  reserved.style.width = percent(gpu.total - gpu.capacity, gpu.total);
  reserved.title = `reserved by driver and headroom: ${memory(gpu.total - gpu.capacity)}`;
  requests.append(reserved);
  const use = make("div", "use");
  for (const [kind, amount] of [["live", gpu.used], ["unmanaged", gpu.unmanaged]]) {
    const part = make("span", kind);
    part.style.width = percent(amount, gpu.total);
    use.append(part);
  }
  bar.append(requests, use);
  return bar;
}

// A node is filled when it comes near the screen: 40,000 GPUs are too many elements at once. Nodes
// lie in blocks, which the browser does not lay out while they are far from it.
const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    const node = nodes.get(target.dataset.name);
    if (node) fill(node);
    else for (const element of target.children) near.observe(element);
  }
}, { rootMargin: "600px" });

const empty = make("section", "node");
empty.tabIndex = -1;

function shell(name) {
  const element = empty.cloneNode();
  element.dataset.name = name;
  element.ariaLabel = `Node ${name}`;
  return element;
}

// In a large cluster nodes without problems are one line each.
const MANY = 100;
const isFolded = ({ data, open }) => nodes.size >= MANY && !open && !isBad(data);

const height = (node) => (isFolded(node) ? 44 : node.data.gpus.length * 34 + 10);

const sum = (data, of) => data.gpus.reduce((sum, gpu) => sum + of(gpu), 0);
const share = (data) => sum(data, (gpu) => gpu.held) / Math.max(1, sum(data, (gpu) => gpu.capacity));
const SORTS = {
  name: () => 0,
  available: (data) => -sum(data, (gpu) => gpu.available),
  piece: (data) => -Math.max(0, ...data.gpus.map((gpu) => gpu.available)),
  full: (data) => -share(data),
  bad: (data) => (isBad(data) ? 0 : 1),
};

// Puts all nodes into blocks, in the order that is chosen. They stay there while amounts change.
function arrange() {
  near.disconnect();
  const key = SORTS[$("sort").value];
  order = [...nodes.values()].map((node) => [key(node.data), node]);
  order = order.sort(([a, one], [b, other]) => a - b || natural(one.name, other.name)).map(([, node]) => node);
  blocks = [];
  for (let at = 0; at < order.length; at += BLOCK) {
    const block = { element: make("div", "block"), nodes: order.slice(at, at + BLOCK) };
    block.element.append(...block.nodes.map(({ element }) => element));
    blocks.push(block);
  }
  for (const node of order) {
    node.element.style.minHeight = `${height(node)}px`;
    if (node.filled && node.folded !== isFolded(node)) fill(node);
  }
  $("nodes").replaceChildren(...blocks.map(({ element }) => element));
  for (const { element } of blocks) near.observe(element);
}

function fill(node) {
  const { name, data, element } = node;
  const head = make("div");
  const available = data.gpus.reduce((sum, gpu) => sum + gpu.available, 0);
  head.append(make("h2", "", name), make("span", "sub", `${data.gpus.length} GPUs, available ${memory(available)}`));
  if (data.state) head.append(make("span", "note", `⚠ ${data.state}`));
  const list = make("div");
  node.folded = isFolded(node);
  if (node.folded) {
    const show = make("button", "", "Show GPUs");
    show.ariaLabel = `Show GPUs of ${name}`;
    show.onclick = () => unfold(node);
    list.append(show);
  }
  for (const gpu of node.folded ? [] : data.gpus) {
    // A cause of the whole node stands once, below its name.
    const own = gpu.sick && gpu.sick !== data.state;
    const line = make("div", own ? "gpu sick" : "gpu");
    const label = make("span", "", `${gpu.gpu} ${gpu.model}`);
    label.title = gpu.model;
    const state = own ? fault(gpu.sick) : make("span", "num", gpu.sick ? "no new pods" : `${gpu.starting.length ? "a pod starts, " : ""}available ${memory(gpu.available)}`);
    line.append(label, bar(gpu), state);
    list.append(line);
  }
  element.style.minHeight = `${height(node)}px`;
  element.replaceChildren(head, list);
  node.filled = true;
}

// In short; the rest on a click.
function fault(reason) {
  const box = make("details", "note");
  box.append(make("summary", "", `⚠ ${short(reason)}`));
  if (short(reason) !== reason) box.append(reason);
  return box;
}

function unfold(node) {
  node.open = true;
  fill(node);
  node.element.focus();
}

const takesNone = (data) => data.gpus.every((gpu) => gpu.sick);
const hasMemory = (data) => data.gpus.some((gpu) => gpu.available > 0);

const wanted = () => $("q").value.toLowerCase().split(/\s+/).filter(Boolean);

function searched(node) {
  const words = () => node.data.gpus.flatMap((gpu) => [gpu.model, ...gpu.pods.map(([pod]) => pod)]);
  return node.search ??= [node.name, ...words()].join(" ").toLowerCase();
}

function chosen(node, words) {
  return words.every((word) => searched(node).includes(word)) &&
    (!$("bad").checked || isBad(node.data)) && (!$("out").checked || takesNone(node.data)) && (!$("free").checked || hasMemory(node.data)) &&
    (!$("unmanaged").checked || node.data.gpus.some((gpu) => gpu.unmanaged > 0));
}

function filter() {
  const words = wanted();
  let shown = 0;
  for (const block of blocks) {
    let tall = 0;
    for (const node of block.nodes) {
      const hidden = !chosen(node, words);
      if (node.element.hidden !== hidden) node.element.hidden = hidden;
      if (hidden) continue;
      shown += 1;
      tall += height(node);
    }
    block.element.hidden = tall === 0;
    const size = `auto ${tall}px`;
    if (block.element.style.containIntrinsicSize !== size) block.element.style.containIntrinsicSize = size;
  }
  $("count").textContent = `${shown} of ${nodes.size} nodes`;
  $("gpus").classList.toggle("empty", !nodes.size);
  $("nodes").querySelector(".none")?.remove();
  if (!shown) $("nodes").append(none());
  redraw();
}

// The checkboxes among the filters.
const ONLY = ["bad", "out", "free", "unmanaged"];

// The filters or the tab are others than before.
function changed() {
  firstPage();
  remember();
  filter();
  drawTab();
}

// What to say and do where no node is shown.
function none() {
  const box = make("div", "none");
  if (!nodes.size) {
    box.append(nothing("No node reports GPUs. Are gpustow's agents running?"), make("pre", "", "kubectl gpustow check\nkubectl get pods -n gpustow-system -o wide"));
    return box;
  }
  const clear = make("button", "", "Clear the filters");
  clear.onclick = () => {
    $("q").value = "";
    for (const id of ONLY) $(id).checked = false;
    changed();
  };
  box.append(nothing("No node matches the filters."), clear);
  return box;
}

let drawing = false;
function redraw() {
  if (drawing || tab !== "gpus") return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const words = wanted();
    overview.draw(order, (node) => chosen(node, words));
  });
}

// From a cell of the overview to its node in the list.
function goTo(name) {
  const node = nodes.get(name);
  const { element } = node;
  if (element.hidden) return;
  if (isFolded(node)) unfold(node);
  for (const other of $("nodes").querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  element.tabIndex = 0;
  element.scrollIntoView({ block: "center" });
  element.focus();
}

function receive(update) {
  if (update.full) nodes.clear();
  if (update.rest) {
    rest = update.rest;
    colourAll(rest.teams.map(({ team }) => team));
    legend();
  }
  let others = update.full;
  for (const [name, data] of Object.entries(update.nodes)) {
    const old = nodes.get(name);
    if (data === null) {
      others = nodes.delete(name) || others;
      continue;
    }
    const node = old ?? { name, element: shell(name), filled: false, open: false };
    node.data = data;
    node.search = undefined;
    nodes.set(name, node);
    if (!old) others = true;
    else if (old.filled) fill(old);
  }
  if (others) arrange();
  const first = blocks[0]?.nodes[0].element;
  if (first && !$("nodes").querySelector("[tabindex='0']")) first.tabIndex = 0;
  stats();
  filter();
  drawTab();
}

function stats() {
  const sum = { gpus: 0, available: 0, held: 0, used: 0, others: 0, capacity: 0, bad: 0, piece: 0 };
  for (const { data } of nodes.values()) {
    sum.bad += isBad(data) ? 1 : 0;
    for (const gpu of data.gpus) {
      sum.gpus += 1;
      sum.available += gpu.available;
      sum.piece = Math.max(sum.piece, gpu.available);
      sum.held += gpu.held;
      sum.used += gpu.used;
      sum.others += gpu.unmanaged;
      sum.capacity += gpu.capacity;
    }
  }
  const share = (part) => `${Math.round((100 * part) / Math.max(1, sum.capacity))} %`;
  const waiting = (text) => () => {
    $("q").value = text;
    tab = "waiting";
    changed();
  };
  const only = (id) => () => {
    $(id).checked = !$(id).checked;
    if (tab !== "table") tab = "gpus";
    changed();
  };
  const entries = [
    ["Waiting", rest.waiting.length, waiting("")], ["Largest free piece", memory(sum.piece)], ["Available", memory(sum.available)],
    ["GPUs", sum.gpus], ["Requested", share(sum.held)], ["In use", share(sum.used)], ["Problems", sum.bad, only("bad")],
  ];
  const queued = rest.waiting.filter((it) => it.queued);
  const oldest = () => `${queued.length}, ${age(Date.now() / 1000 - queued[0].created)}`;
  if (queued.length) entries.splice(1, 0, ["Queued, oldest", oldest(), waiting("queued")]);
  if (sum.others) entries.splice(-1, 0, ["Unmanaged", memory(sum.others), only("unmanaged")]);
  const focused = document.activeElement?.dataset.stat;
  $("stats").replaceChildren(...entries.map(([name, value, act]) => {
    const entry = make("div");
    const place = make("dd");
    if (act) {
      const button = make("button", "", String(value));
      button.dataset.stat = name;
      button.ariaLabel = `${name}: ${value}, show`;
      button.onclick = act;
      place.append(button);
    } else {
      place.append(String(value));
    }
    entry.append(make("dt", "", name), place);
    return entry;
  }));
  if (focused) $("stats").querySelector(`[data-stat="${focused}"]`)?.focus();
}

// The largest namespaces.
const NAMED = 8;

function legend() {
  const teams = [...rest.teams].sort((a, b) => b.requested - a.requested).filter(({ requested }) => requested);
  const keys = teams.slice(0, NAMED).map(({ team }) => {
    const key = make("span", "key");
    const swatch = make("span", "swatch");
    swatch.style.background = colour(team);
    key.append(swatch, ` ${team}`);
    return key;
  });
  if (teams.length > NAMED) keys.push(make("span", "key", `and ${teams.length - NAMED} more`));
  $("namespaces").replaceChildren(...keys);
}

function drawTab() {
  for (const name of TABS) {
    $(name).hidden = name !== tab;
    const button = $(`tab-${name}`);
    button.setAttribute("aria-selected", String(name === tab));
    button.tabIndex = name === tab ? 0 : -1;
  }
  $("panel").setAttribute("aria-labelledby", `tab-${tab}`);
  for (const element of $("filters").querySelectorAll(".ofNodes")) element.hidden = tab === "waiting";
  $("find").hidden = tab === "teams";
  const words = wanted();
  if (tab === "gpus") redraw();
  if (tab === "table") drawTable(order.filter((node) => chosen(node, words)), none);
  if (tab === "waiting") drawWaiting(rest.waiting, words, ask);
  if (tab === "teams") drawTeams(rest.teams);
}

// The URL holds what is shown, so that it can be sent to a colleague with the same page open.
function remember() {
  const params = new URLSearchParams();
  if ($("q").value) params.set("q", $("q").value);
  for (const id of ONLY) if ($(id).checked) params.set(id, "1");
  if ($("sort").value !== "name") params.set("sort", $("sort").value);
  if (tab !== "gpus") params.set("tab", tab);
  const query = params.toString();
  history.replaceState(null, "", query ? `?${query}` : location.pathname);
}

function recall() {
  const params = new URLSearchParams(location.search);
  $("q").value = params.get("q") ?? "";
  for (const id of ONLY) $(id).checked = params.has(id);
  $("sort").value = params.get("sort") in SORTS ? params.get("sort") : "name";
  tab = TABS.includes(params.get("tab")) ? params.get("tab") : "gpus";
}

function open(name) {
  tab = name;
  firstPage();
  remember();
  drawTab();
}

function move(step) {
  const shown = [...$("nodes").querySelectorAll(".node:not([hidden])")];
  if (!shown.length) return;
  const at = shown.indexOf(document.activeElement);
  const next = shown[Math.min(shown.length - 1, Math.max(0, at + step))];
  for (const element of $("nodes").querySelectorAll("[tabindex='0']")) element.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("input", (event) => {
  if (event.target === $("sort")) arrange();
  changed();
});

// On a phone the filters and the legend are folded.
const narrow = matchMedia("(max-width: 800px)");
const fold = () => { for (const id of ["find", "key"]) $(id).open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();
overview.start(redraw, goTo);
for (const name of TABS) $(`tab-${name}`).onclick = () => open(name);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target === $("q") || event.target === $("token") || event.target === $("sort");
  const onTab = event.target.getAttribute?.("role") === "tab";
  if (typing && event.key === "Escape") $("q").blur();
  if (typing) return;
  if (onTab && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    const step = event.key === "ArrowLeft" ? TABS.length - 1 : 1;
    open(TABS[(TABS.indexOf(tab) + step) % TABS.length]);
    $(`tab-${tab}`).focus();
  } else if (event.key === "/") {
    event.preventDefault();
    $("find").open = true;
    $("q").focus();
  } else if (TABS[Number(event.key) - 1]) {
    open(TABS[Number(event.key) - 1]);
  } else if (tab === "gpus" && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
    event.preventDefault();
    move(event.key === "ArrowDown" ? 1 : -1);
  }
});

// Where the page is served to others, a token of the cluster is asked for; it is kept nowhere.
let token = "";
const ask = (path) => fetch(path, token ? { headers: { Authorization: `Bearer ${token}` } } : {});

function signIn(said) {
  $("status").textContent = "Not signed in";
  $("said").textContent = token ? said : "";
  $("signin").hidden = false;
  return new Promise((done) => {
    $("signin").onsubmit = (event) => {
      event.preventDefault();
      token = $("token").value.trim();
      $("token").value = "";
      $("signin").hidden = true;
      done();
    };
  });
}

// Reads one stream of server-sent events to its end. Not an EventSource: that sends no token.
async function read(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    if (!value.includes("\n")) continue;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      receive(JSON.parse(event.slice(6)));
      $("status").textContent = "Live";
    }
  }
}

async function follow() {
  for (;;) {
    try {
      const answer = await ask("events");
      if (answer.status === 401 || answer.status === 403) {
        await signIn(await answer.text());
        continue;
      }
      if (answer.ok) await read(answer.body);
    } catch {
      // Said below, for an end without an error as well.
    }
    $("status").textContent = "Not connected: is kubectl gpustow ui still running? Trying again";
    await new Promise((later) => setTimeout(later, 2000));
  }
}

recall();
drawTab();
follow();
