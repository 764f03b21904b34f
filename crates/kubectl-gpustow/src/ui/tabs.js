// The tabs beside the bars: GPUs as a table, the pods that wait, the teams.

import { $, age, colour, make, memory, natural, percent, workloads } from "./base.js";

const PAGE = 500;
let page = 0;
export const firstPage = () => { page = 0; };

function table(caption, heads, rows) {
  const table = make("table");
  table.append(make("caption", "", caption));
  const head = table.createTHead().insertRow();
  for (const [text, kind] of heads) {
    const cell = make("th", kind ?? "", text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((cell, index) => {
      const place = make("td", heads[index][1] ?? "");
      [place.dataset.head] = heads[index];
      place.append(cell instanceof Node ? cell : String(cell));
      row.append(place);
    });
  }
  return table;
}

export const nothing = (text) => make("p", "nothing", text);

const state = (problem) => (problem ? make("span", "note", `⚠ ${problem}`) : "ready");

// By workload; the title names each pod.
function pods(gpu) {
  const held = workloads(gpu).map(({ name, amounts }) => `${name} ${memory(amounts[0])}`);
  const cell = make("span", "", [...held, ...gpu.others].join(", "));
  cell.title = gpu.pods.map(([pod, held]) => `${pod} ${memory(held)}`).join("\n");
  return cell;
}

// `chosen` nodes, in the order of the list.
export function drawTable(chosen, whenNone) {
  const gpus = chosen.flatMap(({ name, data }) => data.gpus.map((gpu) => ({ name, data, gpu })));
  if (!gpus.length) return $("table").replaceChildren(whenNone());
  const pages = Math.ceil(gpus.length / PAGE);
  page = Math.min(page, pages - 1);
  const rows = gpus.slice(page * PAGE, (page + 1) * PAGE).map(({ name, data, gpu }) => [
    name, gpu.gpu, gpu.model, state(gpu.sick || data.state), memory(gpu.held), memory(gpu.used),
    memory(gpu.available), gpu.busy === null ? "–" : `${gpu.busy} %`, memory(gpu.unmanaged), pods(gpu),
  ]);
  const heads = [["Node", "name"], ["GPU", "num"], ["Model", "name"], ["State"], ["Requested", "num"], ["In use", "num"],
    ["Available", "num"], ["Busy", "num"], ["Unmanaged", "num"], ["Pods", "pods"]];
  const parts = [];
  for (const [text, step] of pages > 1 ? [["Previous page", -1], ["Next page", 1]] : []) {
    const button = make("button", "", text);
    button.disabled = page + step < 0 || page + step >= pages;
    button.onclick = () => { page += step; drawTable(chosen, whenNone); };
    parts.push(button);
  }
  parts.push(table(`GPUs, page ${page + 1} of ${pages}`, heads, rows));
  $("table").replaceChildren(...parts);
}

const answers = new Map(); // pod -> text

async function why(pod, ask) {
  const answer = await ask(`why?pod=${encodeURIComponent(pod)}`);
  if (!answer.ok) return answer.text();
  const why = await answer.json();
  const lines = [why.summary];
  for (const { nodes, reason } of why.refusals) lines.push(`${nodes} ${nodes === 1 ? "node" : "nodes"}: ${reason}`);
  for (const near of why.nearest) {
    const freed = near.freedBy.length ? `; fits once ${near.freedBy.map(({ pod, bytes }) => `${pod} (${memory(bytes / 1048576)})`).join(" and ")} ends` : "";
    const lacks = near.refuses ? `takes no pods: ${near.refuses}` :
      near.noLimit ? `cannot limit memory: ${near.noLimit}` : `${memory(near.lacksBytes / 1048576)} short`;
    lines.push(`${near.node} GPU ${near.gpu}: ${lacks}${freed}`);
  }
  if (why.gang) lines.push(`Group ${why.gang.group} needs ${why.gang.minCount} pods at the same time; ${why.gang.fit} fit:`);
  for (const { what, pods } of why.gang?.parts ?? []) lines.push(`${pods.length} ${what}: ${pods.slice(0, 3).join(", ")}`);
  if (why.means) lines.push("To make room for it:");
  for (const { means, does } of why.means ?? []) lines.push(`  ${means} ${does}`);
  return lines.join("\n");
}

// Equal pods of one owner that wait for the same reason are one row; its oldest pod answers for all.
function grouped(pods) {
  const groups = new Map();
  for (const pod of pods) {
    const key = JSON.stringify([pod.owner ?? pod.group ?? pod.pod, pod.group, pod.reason, pod.mib]);
    if (groups.has(key)) groups.get(key).push(pod);
    else groups.set(key, [pod]);
  }
  return [...groups.values()];
}

export function drawWaiting(waiting, words, ask) {
  const pods = waiting.filter((it) => words.every((word) => `${it.pod} ${it.owner ?? ""} ${it.group ?? ""} ${it.reason}`.toLowerCase().includes(word)));
  if (!pods.length) {
    const text = waiting.length ? "No waiting pod matches the filter." : "No pod waits for GPU memory.";
    return $("waiting").replaceChildren(nothing(text));
  }
  const now = Date.now() / 1000;
  const groups = grouped(pods);
  const rows = groups.slice(0, PAGE).map((group) => {
    const [{ pod, owner, group: gang, mib, created, reason, said }] = group;
    const cell = make("div");
    const button = make("button", "", "Why?");
    button.setAttribute("aria-label", `Why does ${pod} wait?`);
    button.onclick = async () => { answers.set(pod, await why(pod, ask)); drawWaiting(waiting, words, ask); };
    cell.append(make("span", "", reason), " ", button);
    if (answers.has(pod)) {
      cell.append(make("pre", "", answers.get(pod)));
      if (said) cell.append(make("p", "sub", `kube-scheduler's answer: ${said}`));
    }
    const all = group.length > 1 ? `${owner ?? `group ${gang}`} ×${group.length}` : pod;
    const name = make("div", "", all);
    if (gang && (owner || group.length === 1)) name.append(make("p", "sub", `group ${gang}`));
    return [name, memory(mib), age(now - created), cell];
  });
  const caption = `${pods.length} ${pods.length === 1 ? "pod waits" : "pods wait"}, oldest first` +
    (groups.length > PAGE ? `; the first ${PAGE} groups` : "");
  $("waiting").replaceChildren(table(caption, [["Pods", "pods"], ["Asks", "num"], ["Oldest", "num"], ["Waits because"]], rows));
}

export function drawTeams(teams) {
  if (!teams.length) return $("teams").replaceChildren(nothing("No pod holds or awaits GPU memory."));
  const keys = ["pods", "waiting", "requested", "used", "idle"];
  const total = Object.fromEntries(keys.map((key) => [key, teams.reduce((sum, row) => sum + row[key], 0)]));
  const most = Math.max(1, ...teams.map((row) => row.requested));
  const bar = (row) => {
    const bar = make("div", "bar share");
    const held = make("span");
    held.style.background = colour(row.team);
    held.style.width = percent(row.requested, most);
    const use = make("span", "live");
    use.style.width = percent(row.used, most);
    bar.append(held, use);
    return bar;
  };
  const line = (row, name, share) => [name, row.pods, row.waiting, memory(row.requested), memory(row.used), memory(row.idle), share];
  const rows = [...teams].sort((a, b) => b.requested - a.requested || natural(a.team, b.team));
  const heads = [["Namespace", "name"], ["Pods", "num"], ["Waiting", "num"], ["Requested", "num"], ["In use", "num"], ["Idle", "num"], ["Requested and in use"]];
  $("teams").replaceChildren(table("GPU memory that each namespace holds, uses and leaves idle", heads,
    [line(total, "All", ""), ...rows.map((row) => line(row, row.team, bar(row)))]));
}
