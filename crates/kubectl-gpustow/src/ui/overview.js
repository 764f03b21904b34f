// The whole cluster at a glance: a cell per GPU, coloured by fill, on one canvas; a column per node.

import { $, describe, isBad } from "./base.js";

const canvas = $("overview");
let columns = []; // { node, x, y } of what is drawn
let side = 0;
let wide = 0; // a column and the gap beside it
let deep = 1;
let at = null; // { column, gpu }

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const gap = (size) => (size > 4 ? 2 : 1);

// The largest cells with which everything is at most this tall.
function fitted(count, width, tall) {
  for (let size = 16; size > 2; size -= 1) {
    const rows = Math.ceil(count / Math.max(1, Math.floor(width / (size + gap(size)))));
    if (rows * (deep * size + 2 * gap(size)) <= tall) return size;
  }
  return 2;
}

function paint(pen, gpu, state, x, y, colours) {
  const size = side > 4 ? side - 1 : side;
  const crossed = gpu.sick && side > 4;
  if (gpu.sick) pen.fillStyle = crossed ? colours.back : colours.bad;
  else pen.fillStyle = colours.fill[Math.min(4, Math.floor((5 * gpu.held) / Math.max(1, gpu.capacity)))];
  pen.fillRect(x, y, size, size);
  if (!crossed) return;
  // Not by colour alone: failed GPUs are crossed, those of a node that takes no pods at all have a bar.
  pen.strokeStyle = colours.bad;
  pen.lineWidth = Math.max(1, side / 7);
  pen.beginPath();
  if (gpu.sick === state) {
    pen.moveTo(x, y + size / 2);
    pen.lineTo(x + size, y + size / 2);
  } else {
    pen.moveTo(x, y);
    pen.lineTo(x + size, y + size);
    pen.moveTo(x + size, y);
    pen.lineTo(x, y + size);
  }
  pen.rect(x + 0.5, y + 0.5, size - 1, size - 1);
  pen.stroke();
}

// `nodes` in the order of the list, with whether the filter shows them.
export function draw(nodes, shown) {
  const width = canvas.parentElement.clientWidth;
  canvas.hidden = nodes.length < 2 || width === 0;
  if (canvas.hidden) return;
  deep = Math.max(1, ...nodes.map(({ data }) => data.gpus.length));
  side = fitted(nodes.length, width, Math.max(160, innerHeight * 0.62));
  wide = side + gap(side);
  const across = Math.max(1, Math.floor(width / wide));
  const pitch = deep * side + 2 * gap(side);
  const tall = Math.ceil(nodes.length / across) * pitch;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.min(width, across * wide) * ratio;
  canvas.height = tall * ratio;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${tall}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const colours = {
    back: style("--back"), bad: style("--bad"), mark: style("--text"),
    fill: [0, 1, 2, 3, 4].map((step) => style(`--fill${step}`)),
  };
  let failed = 0;
  let barred = 0;
  columns = nodes.map((node, index) => {
    const column = { node, x: (index % across) * wide, y: Math.floor(index / across) * pitch };
    pen.globalAlpha = shown(node) ? 1 : 0.15;
    node.data.gpus.forEach((gpu, place) => {
      paint(pen, gpu, node.data.state, column.x, column.y + place * side, colours);
      if (gpu.sick && gpu.sick === node.data.state) barred += 1;
      else if (gpu.sick) failed += 1;
    });
    return column;
  });
  pen.globalAlpha = 1;
  $("cell").textContent ||= "A column per node, a cell per GPU. Click to jump to the node.";
  if (at && document.activeElement === canvas) mark(pen, colours.mark);
  const bad = nodes.filter(({ data }) => isBad(data)).length;
  canvas.ariaLabel = `Overview of ${nodes.length} nodes, ${bad} with problems: ${failed} failed GPUs, ${barred} on nodes that take no pods. ` +
    "Arrows move, Enter goes to the node";
}

function mark(pen, colour) {
  const column = columns[Math.min(at.column, columns.length - 1)];
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  pen.strokeRect(column.x - 1, column.y + at.gpu * side - 1, side + 1, side + 1);
}

function say(column, gpu) {
  const { node } = column;
  const data = node.data.gpus[gpu];
  $("cell").textContent = data ? `${node.name} ${describe(data)}` : `${node.name}: ${node.data.state || "no GPU here"}`;
}

function below(event) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const pitch = deep * side + 2 * gap(side);
  const across = Math.max(1, Math.floor(box.width / wide));
  const column = Math.floor(y / pitch) * across + Math.min(across - 1, Math.floor(x / wide));
  const gpu = Math.floor((y % pitch) / side);
  return columns[column] ? { column, gpu } : null;
}

// `redraw` paints again; `goTo` shows a node in the list.
export function start(redraw, go) {
  canvas.addEventListener("pointermove", (event) => {
    const found = below(event);
    if (found) say(columns[found.column], found.gpu);
  });
  canvas.addEventListener("click", (event) => {
    const found = below(event);
    if (found) go(columns[found.column].node.name);
  });
  canvas.addEventListener("focus", () => { at ??= { column: 0, gpu: 0 }; say(columns[at.column], at.gpu); redraw(); });
  canvas.addEventListener("blur", redraw);
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0] };
    if (event.key === "Enter" && at) go(columns[at.column].node.name);
    const step = steps[event.key];
    if (!step || !columns.length) return;
    event.preventDefault();
    event.stopPropagation();
    at ??= { column: 0, gpu: 0 };
    const across = Math.max(1, Math.floor(parseFloat(canvas.style.width) / wide));
    let { column, gpu } = at;
    column += step[0];
    gpu += step[1];
    // Beyond the last GPU of a column the next row of nodes begins.
    if (gpu < 0) { column -= across; gpu = deep - 1; }
    column = Math.min(columns.length - 1, Math.max(0, column));
    const count = columns[column].node.data.gpus.length;
    if (step[1] > 0 && gpu >= count) { column = Math.min(columns.length - 1, column + across); gpu = 0; }
    at = { column, gpu: Math.max(0, Math.min(columns[column].node.data.gpus.length - 1, gpu)) };
    say(columns[at.column], at.gpu);
    redraw();
  });
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
