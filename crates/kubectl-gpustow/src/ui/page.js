// The page: one EventSource, one picture of the cluster, text only. Memory comes in MiB.

const nodes = new Map(); // name -> { name, data, search, element, filled }
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

// A node is filled when it comes near the screen: 40,000 GPUs are too many elements at once.
const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const node = nodes.get(target.dataset.name);
    if (isIntersecting && node && !node.filled) fill(node);
  }
}, { rootMargin: "600px" });

function shell(name) {
  const element = make("section", "node");
  element.tabIndex = -1;
  element.dataset.name = name;
  element.setAttribute("aria-label", `Node ${name}`);
  near.observe(element);
  return element;
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

function chosen({ data, search }) {
  const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => search.includes(word)) &&
    (!$("bad").checked || isBad(data)) && (!$("free").checked || hasRoom(data));
}

function filter() {
  let shown = 0;
  for (const node of nodes.values()) {
    const show = chosen(node);
    node.element.hidden = !show;
    shown += show ? 1 : 0;
  }
  $("count").textContent = `${shown} of ${nodes.size} nodes`;
}

function receive(update) {
  if (update.full) {
    nodes.clear();
    near.disconnect();
    $("nodes").replaceChildren();
  }
  if (update.rest) rest = update.rest;
  const fresh = [];
  for (const [name, data] of Object.entries(update.nodes)) {
    const old = nodes.get(name);
    if (data === null) {
      old?.element.remove();
      nodes.delete(name);
      continue;
    }
    const pods = data.gpus.flatMap((gpu) => [gpu.model, ...gpu.pods.map(([pod]) => pod)]);
    const node = old ?? { name, element: shell(name), filled: false };
    node.data = data;
    node.search = [name, ...pods].join(" ").toLowerCase();
    const height = `${data.gpus.length * 34 + 10}px`;
    node.element.style.minHeight = height;
    node.element.style.containIntrinsicSize = `auto ${height}`;
    nodes.set(name, node);
    if (!old) fresh.push(node.element);
    else if (old.filled) fill(old);
  }
  $("nodes").append(...fresh);
  if (!update.full && fresh.length) {
    const sorted = [...nodes.keys()].sort();
    $("nodes").replaceChildren(...sorted.map((name) => nodes.get(name).element));
  }
  const first = $("nodes").firstElementChild;
  if (first && !$("nodes").querySelector("[tabindex='0']")) first.tabIndex = 0;
  stats();
  filter();
  drawTab();
}

function stats() {
  const all = [...nodes.values()].map(({ data }) => data);
  const gpus = all.flatMap((data) => data.gpus);
  const sum = (key) => gpus.reduce((total, gpu) => total + gpu[key], 0);
  const share = (part) => `${Math.round((100 * part) / Math.max(1, sum("capacity")))} %`;
  const entries = [
    ["Waiting", rest.waiting.length], ["GPUs", gpus.length], ["Room", memory(sum("room"))],
    ["Requested", share(sum("held"))], ["In use", share(sum("used") + sum("strangers"))],
    ["Nodes with problems", all.filter(isBad).length],
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
  for (const [name, node] of nodes) {
    if (!chosen(node)) continue;
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
  const answer = await fetch(`why?pod=${encodeURIComponent(pod)}`);
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
  const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
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
  const shown = [...$("nodes").children].filter((element) => !element.hidden);
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

recall();
drawTab();
const events = new EventSource("events");
events.onmessage = (event) => {
  receive(JSON.parse(event.data));
  $("status").textContent = "Live";
};
events.onerror = () => {
  $("status").textContent = "Not connected: is kubectl gpustow ui still running? Trying again";
};
