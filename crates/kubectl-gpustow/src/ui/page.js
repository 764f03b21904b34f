// The page: one stream of events, one picture of the cluster, text only. Memory comes in MiB.

const nodes = new Map(); // name -> { name, data, search, element, filled }
let blocks = []; // { element, nodes }
const BLOCK = 50;
let rest = { waiting: [], teams: [] };
let tab = "gpus";
let page = 0;
const PAGE = 500;
const TABS = ["gpus", "table", "waiting", "teams"];
const $ = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function memory(mib) {
  if (mib === 0) return "0";
  if (mib < 1024) return `${mib} MiB`;
  return `${Number((mib / 1024).toFixed(1))} GiB`;
}

function age(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

// Pods of one namespace share a colour; the name is always there as well.
function colour(pod) {
  let hash = 2166136261;
  for (const letter of pod.split("/", 1)[0]) hash = Math.imul(hash ^ letter.codePointAt(0), 16777619) >>> 0;
  return `c${(((hash >>> 13) ^ hash) >>> 0) % 8}`;
}

const percent = (part, whole) => `${Math.min(100, (100 * part) / Math.max(1, whole))}%`;

function describe(gpu) {
  const pods = gpu.pods.map(([name, held]) => `${name} ${memory(held)}`).join(", ");
  const strangers = gpu.strangers ? `, others ${memory(gpu.strangers)}` : "";
  const sick = gpu.sick ? `, takes no pods: ${gpu.sick}` : "";
  return `GPU ${gpu.gpu}, ${gpu.model}: ${memory(gpu.held)} of ${memory(gpu.capacity)} requested, ` +
    `${memory(gpu.used)} in use, room ${memory(gpu.room)}${strangers}${sick}. ${pods || "No pods"}.`;
}

function bar(gpu) {
  const bar = make("div", "bar");
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", describe(gpu));
  const requests = make("div", "requests");
  for (const [name, held, used] of gpu.pods) {
    if (!held) continue;
    const segment = make("span", colour(name), name.slice(name.indexOf("/") + 1));
    segment.style.width = percent(held, gpu.total);
    segment.title = `${name}: ${memory(held)} requested` + (used === null ? "" : `, ${memory(used)} in use`);
    requests.append(segment);
  }
  if (gpu.strangers) {
    const strangers = make("span", "strangers");
    strangers.style.width = percent(gpu.strangers, gpu.total);
    strangers.title = `processes of nobody's pod: ${memory(gpu.strangers)}`;
    requests.append(strangers);
  }
  const reserved = make("span", "reserved");
  reserved.style.width = percent(gpu.total - gpu.capacity, gpu.total);
  reserved.title = `reserved by driver and headroom: ${memory(gpu.total - gpu.capacity)}`;
  requests.append(reserved);
  const use = make("div", "use");
  const live = make("span");
  live.style.width = percent(gpu.used + gpu.strangers, gpu.total);
  use.append(live);
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

function shell(name, gpus) {
  const element = empty.cloneNode();
  element.dataset.name = name;
  element.ariaLabel = `Node ${name}`;
  element.style.minHeight = `${height(gpus)}px`;
  return element;
}

const height = (gpus) => gpus * 34 + 10;

// Puts all nodes into blocks, by name.
function arrange() {
  near.disconnect();
  const sorted = [...nodes.keys()].sort().map((name) => nodes.get(name));
  blocks = [];
  for (let at = 0; at < sorted.length; at += BLOCK) {
    const block = { element: make("div", "block"), nodes: sorted.slice(at, at + BLOCK) };
    block.element.append(...block.nodes.map(({ element }) => element));
    blocks.push(block);
  }
  $("nodes").replaceChildren(...blocks.map(({ element }) => element));
  for (const { element } of blocks) near.observe(element);
}

function fill(node) {
  const { name, data, element } = node;
  const head = make("div");
  const room = data.gpus.reduce((sum, gpu) => sum + gpu.room, 0);
  head.append(make("h2", "", name), make("span", "sub", `${data.gpus.length} GPUs, room ${memory(room)}`));
  if (data.state) head.append(make("span", "note", `⚠ ${data.state}`));
  const list = make("div");
  for (const gpu of data.gpus) {
    const line = make("div", gpu.sick ? "gpu sick" : "gpu");
    const label = make("span", "", `${gpu.gpu} ${gpu.model}`);
    label.title = gpu.model;
    const state = gpu.sick ? make("span", "num note", `⚠ ${gpu.sick}`) : make("span", "num", `room ${memory(gpu.room)}`);
    state.title = gpu.sick || "";
    line.append(label, bar(gpu), state);
    list.append(line);
  }
  element.replaceChildren(head, list);
  node.filled = true;
}

const isBad = (data) => data.state !== "" || data.gpus.some((gpu) => gpu.sick);
const hasRoom = (data) => data.gpus.some((gpu) => gpu.room > 0);

const wanted = () => $("q").value.toLowerCase().split(/\s+/).filter(Boolean);

function searched(node) {
  const words = () => node.data.gpus.flatMap((gpu) => [gpu.model, ...gpu.pods.map(([pod]) => pod)]);
  return node.search ??= [node.name, ...words()].join(" ").toLowerCase();
}

function chosen(node, words) {
  return words.every((word) => searched(node).includes(word)) &&
    (!$("bad").checked || isBad(node.data)) && (!$("free").checked || hasRoom(node.data));
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
      tall += height(node.data.gpus.length);
    }
    block.element.hidden = tall === 0;
    const size = `auto ${tall}px`;
    if (block.element.style.containIntrinsicSize !== size) block.element.style.containIntrinsicSize = size;
  }
  $("count").textContent = `${shown} of ${nodes.size} nodes`;
}

function receive(update) {
  if (update.full) nodes.clear();
  if (update.rest) rest = update.rest;
  let others = update.full;
  for (const [name, data] of Object.entries(update.nodes)) {
    const old = nodes.get(name);
    if (data === null) {
      others = nodes.delete(name) || others;
      continue;
    }
    const node = old ?? { name, element: shell(name, data.gpus.length), filled: false };
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
  const sum = { gpus: 0, room: 0, held: 0, used: 0, capacity: 0, bad: 0 };
  for (const { data } of nodes.values()) {
    sum.bad += isBad(data) ? 1 : 0;
    for (const gpu of data.gpus) {
      sum.gpus += 1;
      sum.room += gpu.room;
      sum.held += gpu.held;
      sum.used += gpu.used + gpu.strangers;
      sum.capacity += gpu.capacity;
    }
  }
  const share = (part) => `${Math.round((100 * part) / Math.max(1, sum.capacity))} %`;
  const entries = [
    ["Waiting", rest.waiting.length], ["GPUs", sum.gpus], ["Room", memory(sum.room)],
    ["Requested", share(sum.held)], ["In use", share(sum.used)], ["Nodes with problems", sum.bad],
  ];
  $("stats").replaceChildren(...entries.map(([name, value]) => {
    const entry = make("div");
    entry.append(make("dt", "", name), make("dd", "", String(value)));
    return entry;
  }));
}

function table(caption, heads, rows) {
  const table = make("table");
  table.append(make("caption", "", caption));
  const head = table.createTHead().insertRow();
  for (const [text, number] of heads) {
    const cell = make("th", number ? "num" : "", text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((cell, index) => {
      const place = make("td", heads[index][1] ? "num" : "");
      place.append(cell instanceof Node ? cell : String(cell));
      row.append(place);
    });
  }
  return table;
}

function drawTable() {
  const rows = [];
  const words = wanted();
  for (const [name, node] of nodes) {
    if (!chosen(node, words)) continue;
    for (const gpu of node.data.gpus) {
      rows.push([name, gpu.gpu, gpu.model, memory(gpu.held), memory(gpu.used), memory(gpu.room),
        memory(gpu.strangers), gpu.sick || node.data.state || "ready",
        gpu.pods.map(([pod, held]) => `${pod} ${memory(held)}`).join(", ")]);
    }
  }
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  page = Math.min(page, pages - 1);
  const heads = [["Node"], ["GPU", true], ["Model"], ["Requested", true], ["In use", true],
    ["Room", true], ["Others", true], ["State"], ["Pods"]];
  const caption = `GPUs, page ${page + 1} of ${pages}`;
  const parts = [table(caption, heads, rows.slice(page * PAGE, (page + 1) * PAGE))];
  for (const [text, step] of [["Previous page", -1], ["Next page", 1]]) {
    const button = make("button", "", text);
    button.disabled = page + step < 0 || page + step >= pages;
    button.onclick = () => { page += step; drawTable(); };
    parts.push(button);
  }
  $("table").replaceChildren(...parts);
}

const answers = new Map(); // pod -> text

async function why(pod) {
  const answer = await ask(`why?pod=${encodeURIComponent(pod)}`);
  if (!answer.ok) return answer.text();
  const why = await answer.json();
  const lines = [why.summary];
  for (const { nodes, reason } of why.refusals) lines.push(`${nodes} nodes: ${reason}`);
  for (const near of why.nearest) {
    const freed = near.freedBy.length ? `; the end of ${near.freedBy.join(" and ")} would free it` : "";
    lines.push(`${near.node} GPU ${near.gpu}: lacks ${memory(near.lacksBytes / 1048576)}${freed}`);
  }
  return lines.join("\n");
}

function drawWaiting() {
  const words = wanted();
  const pods = rest.waiting.filter(({ pod }) => words.every((word) => pod.toLowerCase().includes(word)));
  const now = Date.now() / 1000;
  const rows = pods.slice(0, PAGE).map(({ pod, mib, created, said }) => {
    const cell = make("div");
    cell.append(make("span", "", said || "no scheduler has said anything yet"));
    const button = make("button", "", "Why?");
    button.setAttribute("aria-label", `Why does ${pod} wait?`);
    button.onclick = async () => { answers.set(pod, await why(pod)); drawWaiting(); };
    cell.append(" ", button);
    if (answers.has(pod)) cell.append(make("pre", "", answers.get(pod)));
    return [pod, memory(mib), age(now - created), cell];
  });
  const caption = `${pods.length} pods wait, oldest first` + (pods.length > PAGE ? `; the first ${PAGE}` : "");
  const heads = [["Pod"], ["Asks", true], ["Age", true], ["kube-scheduler said"]];
  $("waiting").replaceChildren(table(caption, heads, rows));
}

function drawTeams() {
  const rows = rest.teams.map((row) => [row.team, row.pods, row.waiting, memory(row.requested),
    memory(row.used), memory(row.idle)]);
  const heads = [["Namespace"], ["Pods", true], ["Waiting", true], ["Requested", true],
    ["In use", true], ["Idle", true]];
  $("teams").replaceChildren(table("What each namespace holds, uses and leaves idle", heads, rows));
}

function drawTab() {
  for (const name of TABS) {
    $(name).hidden = name !== tab;
    const button = $(`tab-${name}`);
    button.setAttribute("aria-selected", String(name === tab));
    button.tabIndex = name === tab ? 0 : -1;
  }
  $("panel").setAttribute("aria-labelledby", `tab-${tab}`);
  if (tab === "table") drawTable();
  if (tab === "waiting") drawWaiting();
  if (tab === "teams") drawTeams();
}

// The URL holds what is shown, so that it can be sent to a colleague with the same page open.
function remember() {
  const params = new URLSearchParams();
  if ($("q").value) params.set("q", $("q").value);
  if ($("bad").checked) params.set("bad", "1");
  if ($("free").checked) params.set("free", "1");
  if (tab !== "gpus") params.set("tab", tab);
  const query = params.toString();
  history.replaceState(null, "", query ? `?${query}` : location.pathname);
}

function recall() {
  const params = new URLSearchParams(location.search);
  $("q").value = params.get("q") ?? "";
  $("bad").checked = params.has("bad");
  $("free").checked = params.has("free");
  tab = TABS.includes(params.get("tab")) ? params.get("tab") : "gpus";
}

function open(name) {
  tab = name;
  page = 0;
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
$("filters").addEventListener("input", () => { page = 0; remember(); filter(); drawTab(); });
for (const name of TABS) $(`tab-${name}`).onclick = () => open(name);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target === $("q");
  const onTab = event.target.getAttribute?.("role") === "tab";
  if (typing && event.key === "Escape") $("q").blur();
  if (typing) return;
  if (onTab && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    const step = event.key === "ArrowLeft" ? TABS.length - 1 : 1;
    open(TABS[(TABS.indexOf(tab) + step) % TABS.length]);
    $(`tab-${tab}`).focus();
  } else if (event.key === "/") {
    event.preventDefault();
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
