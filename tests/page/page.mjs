// The page in a real browser: what it shows, what it asks for, what it lets hostile names do.
// node page.mjs PROGRAM BROWSER [--screenshots FOLDER]

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";
import { HOSTILE, cluster, history, hostile, pod } from "./cluster.mjs";

const [program, browserPath, option, folder] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const scratch = mkdtempSync(join(tmpdir(), "gpustow-page-"));
const running = [];

/// Starts `kubectl gpustow ui` on a made-up cluster; its address and the file it reads.
async function serve(made) {
  const file = join(scratch, `cluster-${running.length}.json`);
  writeFileSync(file, JSON.stringify(made));
  const child = spawn(program, ["--from", file, "ui"], { stdio: ["ignore", "pipe", "inherit"] });
  running.push(child);
  const lines = createInterface({ input: child.stdout });
  for await (const line of lines) return { url: line, file };
  throw new Error("kubectl-gpustow ui ended without an address");
}

const launch = (args = []) => chromium.launch({ executablePath: browserPath, args: ["--no-sandbox", ...args] });
const browser = await launch();

/// What the pages of a case did wrong: errors on the console, and requests to anybody else.
const opened = [];

/// A page, until the case ends.
async function open(url, { scheme = "light", width = 1400, height = 900, scale = 1 } = {}) {
  const context = await browser.newContext({ colorScheme: scheme, viewport: { width, height }, deviceScaleFactor: scale });
  const page = await context.newPage();
  const wrong = [];
  page.on("pageerror", (error) => wrong.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error") wrong.push(message.text());
  });
  const { origin } = new URL(url);
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== origin) wrong.push(`foreign request: ${request.url()}`);
  });
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("status").textContent === "Live");
  opened.push({ context, wrong });
  return page;
}

async function accessible(page, what) {
  // Through the debugger: the page's own policy lets no foreign script in, which is the point.
  const session = await page.context().newCDPSession(page);
  const run = (expression) => session.send("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
  await run(axe);
  const { result } = await run("axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => JSON.stringify(violations))");
  const violations = JSON.parse(result.value);
  const found = violations.flatMap(({ id, nodes }) => nodes.map(({ html, failureSummary }) => `${id}: ${html} ${failureSummary}`));
  assert.deepEqual(found, [], `axe: ${what}`);
}

const visible = (page) => page.locator("section.node:visible").count();

const cases = {
  async "every tab is accessible in light and dark"() {
    const { url } = await serve(cluster(6, true));
    for (const scheme of ["light", "dark"]) {
      const page = await open(url, { scheme });
      for (const tab of ["GPUs", "Table", "Waiting", "Teams"]) {
        await page.getByRole("tab", { name: tab }).click();
        await accessible(page, `${tab}, ${scheme}`);
      }
    }
  },

  async "filters are in the URL and keys do everything"() {
    const { url } = await serve(cluster(6, true));
    const page = await open(url);
    assert.equal(await visible(page), 6);
    await page.keyboard.press("/");
    await page.keyboard.type("gpu-0003");
    assert.equal(await visible(page), 1);
    assert.ok(page.url().endsWith("?q=gpu-0003"), page.url());
    await page.reload();
    await page.waitForFunction(() => document.querySelectorAll("section.node:not([hidden])").length === 1);
    await page.locator("#q").fill("");
    await page.keyboard.press("Escape");
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowDown");
    const focused = () => page.evaluate(() => document.activeElement.dataset.name);
    assert.equal(await focused(), "gpu-0001");
    await page.keyboard.press("3");
    assert.equal(await page.getByRole("tab", { name: "Waiting" }).getAttribute("aria-selected"), "true");
    await page.getByRole("button", { name: "Why does" }).first().press("Enter");
    await page.waitForSelector("pre");
    assert.match(await page.locator("pre").first().textContent(), /short/);
    await page.keyboard.press("2");
    assert.ok((await page.locator("#table tbody tr").count()) > 6);
    assert.doesNotMatch(await page.locator("#table").textContent(), /NaN/);
    await page.keyboard.press("4");
    assert.ok((await page.locator("#teams tbody tr").count()) > 3);
  },

  async "the overview shows every GPU and leads to its node"() {
    const { url } = await serve(cluster(500, true));
    const page = await open(url);
    const box = await page.locator("#overview").boundingBox();
    assert.ok(box.height < 900 * 0.7 && box.width <= 1400, JSON.stringify(box));
    await page.waitForFunction(() => /500 nodes, \d+ with problems: [1-9]\d* failed GPUs, [1-9]/.test(document.getElementById("overview").ariaLabel));
    const focused = () => page.evaluate(() => document.activeElement.dataset.name);
    await page.locator("#overview").focus();
    for (const key of ["ArrowRight", "ArrowRight", "ArrowDown"]) await page.keyboard.press(key);
    assert.match(await page.locator("#cell").textContent(), /^gpu-0002 GPU 1,.* available [0-9]/);
    await page.keyboard.press("Enter");
    assert.equal(await focused(), "gpu-0002");
    await page.locator("#overview").click({ position: { x: 3, y: 3 } });
    assert.equal(await focused(), "gpu-0000");
  },

  async "nodes are in the order of numbers, or in the one that is chosen"() {
    const made = cluster(11, true);
    const short = (name) => name?.replace(/^gpu-0+(?=\d)/, "gpu-");
    for (const item of made.items) {
      if (item.kind !== "Pod") item.metadata.name = short(item.metadata.name);
      else item.spec.nodeName = short(item.spec.nodeName);
    }
    const { url } = await serve(made);
    const page = await open(url);
    const names = () => page.locator("section.node").evaluateAll((all) => all.map((it) => it.dataset.name));
    assert.deepEqual((await names()).slice(-3), ["gpu-8", "gpu-9", "gpu-10"]);
    await page.getByLabel("Sort").selectOption("available");
    const available = await page.locator("section.node .sub").evaluateAll((all) => all.map((it) => parseFloat(it.textContent.split("available ")[1])));
    assert.deepEqual(available, [...available].sort((a, b) => b - a));
    assert.ok(page.url().endsWith("?sort=available"), page.url());
    await page.reload();
    await page.waitForSelector("section.node");
    assert.equal(await page.getByLabel("Sort").inputValue(), "available");
    await page.getByLabel("Sort").selectOption("bad");
    assert.equal((await names())[0] !== "gpu-0", true);
  },

  async "waiting pods are grouped by owner and reason, gpustow's words first"() {
    const { url } = await serve(cluster(6, true));
    const page = await open(url);
    await page.keyboard.press("3");
    const rows = page.locator("#waiting tbody tr");
    assert.equal(await rows.count(), 13);
    const triton = rows.filter({ hasText: "serving/triton statefulset ×40" });
    assert.match(await triton.textContent(), /not enough free memory on any one GPU \(6 nodes\)/);
    assert.equal(await page.getByText("0/6 nodes are available").count(), 0);
    await triton.getByRole("button").click();
    await page.getByText("kube-scheduler's answer: 0/6 nodes").waitFor();
    assert.match(await triton.locator("pre").textContent(), /To make room for it:\n {2}reclaim is off/);
    await page.keyboard.press("/");
    await page.keyboard.type("absent");
    await page.getByText("No waiting pod matches").waitFor();
  },

  async "a waiting pod names its group, and why says what of the group fits"() {
    const made = cluster(1, 2);
    made.items.push({
      apiVersion: "scheduling.k8s.io/v1beta1", kind: "PodGroup", metadata: { namespace: "ads", name: "training", uid: "training" },
      spec: { schedulingPolicy: { gang: { minCount: 2 } } },
    });
    for (const name of ["worker-0", "worker-1"]) {
      const worker = pod("ads", name, 999999, { message: "group ads/training: 0 of 2 fit" });
      worker.spec.schedulingGroup = { podGroupName: "training" };
      made.items.push(worker);
    }
    const { url } = await serve(made);
    const page = await open(url);
    await page.keyboard.press("3");
    await page.keyboard.press("/");
    await page.keyboard.type("ads/training");
    const rows = page.locator("#waiting tbody tr");
    assert.equal(await rows.count(), 1);
    assert.match(await rows.textContent(), /group ads\/training ×2/);
    await rows.getByRole("button").click();
    await page.getByText("Group ads/training needs 2 pods at the same time; 0 fit:").waitFor();
    await page.getByText("2 need main: 976.6Gi: no GPU as large as the pod asks for: ads/worker-0, ads/worker-1").waitFor();
  },

  async "the queue is told by size and age"() {
    const made = cluster(6, true);
    const queued = made.items.filter(({ metadata }) => metadata.name.startsWith("waiting-"));
    for (const pod of queued) pod.spec.schedulingGates = [{ name: "gpustow.dev/queued" }];
    const { url } = await serve(made);
    const page = await open(url);
    const stats = await page.locator("#stats").textContent();
    assert.match(stats, /Waiting52Queued, oldest12, 23 min/);
    await page.keyboard.press("3");
    assert.equal(await page.locator("#waiting tbody tr").filter({ hasText: "queued" }).count(), 12);
  },

  async "an empty page says what to do"() {
    const { url } = await serve(cluster(0, true));
    const page = await open(url);
    await page.getByText("No node reports GPUs").waitFor();
    await page.getByText("kubectl get pods -n gpustow-system").waitFor();
    await accessible(page, "nothing there");
    const other = await open((await serve(cluster(3, true))).url);
    await other.locator("#q").fill("nowhere");
    await other.getByRole("button", { name: "Clear the filters" }).click();
    assert.equal(await visible(other), 3);
  },

  async "a phone shows everything without scrolling sideways"() {
    const { url } = await serve(cluster(12, true));
    const page = await open(url, { width: 390, height: 800 });
    assert.ok((await page.locator("header").boundingBox()).height < 160);
    for (const key of ["1", "2", "3", "4"]) {
      await page.keyboard.press(key);
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390, `tab ${key}`);
    }
    await page.keyboard.press("3");
    assert.ok(await page.evaluate(() => document.documentElement.scrollHeight) < 4000);
    await page.getByRole("button", { name: "Why does" }).first().click();
    await page.waitForSelector("pre");
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390, "an answer");
  },

  async "counters filter"() {
    const { url } = await serve(cluster(60, true));
    const page = await open(url);
    const counter = (name) => page.locator("#stats").getByRole("button", { name: new RegExp(`^${name}`) });
    const problems = Number(await counter("Problems").textContent());
    await counter("Problems").click();
    assert.equal(await visible(page), problems);
    assert.ok(page.url().endsWith("?bad=1"), page.url());
    await counter("Problems").click();
    assert.equal(await visible(page), 60);
    await counter("Unmanaged").click();
    assert.ok(await visible(page) < 60);
    await page.reload();
    await page.waitForFunction(() => document.querySelector("section.node"));
    assert.ok(await visible(page) < 60);
    await counter("Waiting").click();
    assert.equal(await page.getByRole("tab", { name: "Waiting" }).getAttribute("aria-selected"), "true");
  },

  async "a fault of a whole node is told once, that of a GPU in short and on a click in full"() {
    const made = cluster(8, 4);
    const [first] = made.items.filter(({ kind }) => kind === "GpuNode");
    Object.assign(first.status.gpus[1], { healthy: false, reason: "NVML's error 15 (GPU has fallen off the bus or is otherwise inaccessible)" });
    const { url } = await serve(made);
    const page = await open(url);
    const silent = page.locator("[data-name='gpu-0007']");
    assert.equal((await silent.textContent()).split("agent silent").length - 1, 1);
    assert.equal(await silent.locator(".sick").count(), 0);
    const fault = page.locator("[data-name='gpu-0000'] details");
    assert.equal(await fault.locator("summary").textContent(), "⚠ GPU has fallen off the bus");
    const seen = () => fault.evaluate((it) => it.innerText);
    assert.doesNotMatch(await seen(), /otherwise inaccessible/);
    await fault.locator("summary").click();
    assert.match(await seen(), /otherwise inaccessible/);
    await accessible(page, "an open fault");
    await page.keyboard.press("2");
    assert.match(await page.locator("#table tr", { hasText: "off the bus" }).first().textContent(), /⚠/);
  },

  async "equal pods of one owner are one part of a bar, which names them all"() {
    const made = cluster(1, 1);
    const uuid = made.items.find(({ kind }) => kind === "GpuNode").status.gpus[0].uuid;
    made.items = made.items.filter(({ spec }) => spec.nodeName !== "gpu-0000");
    for (const number of [1, 2, 3]) {
      made.items.push(pod("serving", `triton-${number}`, 1024, { node: "gpu-0000", uuid, set: "triton" }));
    }
    const { url } = await serve(made);
    const page = await open(url);
    const part = page.locator(".requests span", { hasText: "triton ×3" });
    assert.match(await part.getAttribute("title"), /serving\/triton ×3: 3 GiB requested.*\nserving\/triton-1: 1 GiB requested/);
    await page.keyboard.press("2");
    await page.getByText("serving/triton ×3 3 GiB").waitFor();
  },

  async "a namespace has the same colour in every cluster"() {
    const colours = [];
    for (const nodes of [2, 9]) {
      const { url } = await serve(cluster(nodes, true));
      const page = await open(url);
      const key = page.locator("#namespaces .key", { hasText: "vision" });
      colours.push(await key.locator(".swatch").evaluate((it) => it.style.background));
    }
    assert.equal(colours[0], colours[1]);
  },

  async "healthy nodes of a large cluster are a line each until a person asks"() {
    const made = cluster(120, 1);
    const reports = made.items.filter(({ kind }) => kind === "GpuNode");
    made.items = made.items.filter(({ kind }) => kind !== "Pod");
    for (const { metadata: { name }, status } of reports) {
      const [gpu] = status.gpus;
      Object.assign(gpu, { healthy: true, reason: undefined, unmanagedMiB: 0, pods: [] });
      status.heartbeat = new Date().toISOString();
      if (name === "gpu-0001") Object.assign(gpu, { healthy: false, reason: "XID 79" });
      else made.items.push(pod("ads", `all-${name}`, Math.floor(gpu.totalMiB / 2), { node: name, uuid: gpu.uuid }));
    }
    const { url } = await serve(made);
    const page = await open(url);
    const bars = (name) => page.locator(`[data-name='${name}'] .gpu`).count();
    await page.getByRole("button", { name: "Show GPUs of gpu-0000" }).waitFor();
    assert.equal(await bars("gpu-0001"), 1);
    assert.equal(await bars("gpu-0000"), 0);
    await page.getByRole("button", { name: "Show GPUs of gpu-0000" }).click();
    assert.equal(await bars("gpu-0000"), 1);
    await accessible(page, "folded nodes");
    await page.getByLabel("only closed to new pods").check();
    assert.equal(await visible(page), 1);
    await page.locator("#overview").click({ position: { x: 3, y: 3 } });
  },

  async "a phone shows a GPU on its first screen and opens filters and legend on demand"() {
    const { url } = await serve(cluster(12, true));
    const page = await open(url, { width: 390, height: 844 });
    const top = (await page.locator(".gpu").first().boundingBox()).y;
    assert.ok(top < 500, `the first GPU is at ${top} px`);
    assert.equal(await page.getByLabel("Filter", { exact: true }).isVisible(), false);
    await page.getByText("Filters", { exact: true }).click();
    await page.getByLabel("Filter", { exact: true }).fill("gpu-0003");
    assert.equal(await visible(page), 1);
    await page.getByRole("tab", { name: "Table" }).click();
    assert.equal(await page.locator("#table").evaluate((it) => it.scrollWidth <= it.clientWidth), true);
    await accessible(page, "a phone");
  },

  async "hostile names are text"() {
    const { url } = await serve(hostile());
    const page = await open(url);
    for (const key of ["1", "2", "3", "4"]) {
      await page.keyboard.press(key);
      assert.equal(await page.locator("img").count(), 0);
      assert.ok((await page.locator("main").textContent()).includes(HOSTILE), `tab ${key}`);
    }
    await page.keyboard.press("3");
    await page.getByRole("button", { name: "javascript:alert(1)" }).click();
    await page.waitForSelector("pre");
    assert.equal(await page.evaluate(() => window.hostile), undefined);
  },

  async "a pod's bar marks what it requests, uses and should request"() {
    const made = cluster(1, 1);
    const uuid = made.items.find(({ kind }) => kind === "GpuNode").status.gpus[0].uuid;
    made.items = made.items.filter(({ spec }) => spec.nodeName !== "gpu-0000");
    made.items.push(pod("team", "web-0", 8192, { node: "gpu-0000", uuid, set: "web" }));
    made.items.push(pod("team", "new-0", 1024, { node: "gpu-0000", uuid, set: "new" }));
    made.items.find(({ kind }) => kind === "GpuNode").status.gpus[0].pods = [{ uid: "uid-team-web-0", usedMiB: 2048 }];
    made.items.push(history("team", "web", 4096));
    const { url } = await serve(made);
    const page = await open(url);
    const web = page.locator("[title='team/web-0: 8 GiB requested, 2 GiB in use, 4 GiB advised']");
    await web.waitFor();
    const marks = await web.locator("i").evaluateAll((all) => all.map((it) => [it.className, it.style.left]));
    assert.deepEqual(marks, [["used", "25%"], ["advised", "50%"]]);
    await page.locator("[title^='team/new-0: 1 GiB requested']:not([title*='advised'])").waitFor();
    const label = await page.locator(".bar").first().getAttribute("aria-label");
    assert.match(label, /, available [\d.]+ GiB[,.] .*web-0 8 GiB requested, 2 GiB in use, 4 GiB advised/);
    await accessible(page, "advice");
    await page.keyboard.press("2");
    assert.ok(!(await page.locator("#table").textContent()).includes("NaN"));
  },

  async "changes arrive by themselves"() {
    const made = cluster(3, 2);
    const { url, file } = await serve(made);
    const page = await open(url);
    const uuid = made.items.find(({ kind }) => kind === "GpuNode").status.gpus[0].uuid;
    made.items.push(pod("news", "arrived", 1024, { node: "gpu-0000", uuid }));
    made.items = made.items.filter(({ metadata }) => metadata.name !== "gpu-0002");
    made.items = made.items.filter(({ spec }) => spec.nodeName !== "gpu-0002");
    writeFileSync(file, JSON.stringify(made));
    await page.waitForSelector("[aria-label*='news/arrived']");
    await page.waitForFunction(() => document.querySelectorAll("section.node").length === 2);
  },

  async "a broken connection is made again"() {
    const { url } = await serve(cluster(3, 2));
    const { port } = new URL(url);
    const sockets = new Set();
    const between = createServer((near) => {
      const far = connect(port, "127.0.0.1");
      for (const [from, to] of [[near, far], [far, near]]) {
        sockets.add(from);
        from.on("error", () => {}).on("close", () => to.destroy()).pipe(to);
      }
    });
    await new Promise((ready) => between.listen(0, "127.0.0.1", ready));
    const rule = `MAP localhost:${port} 127.0.0.1:${between.address().port}`;
    const other = await launch([`--host-resolver-rules=${rule}`]);
    const page = await other.newPage();
    const status = (text) => page.waitForFunction((text) => document.getElementById("status").textContent.startsWith(text), text);
    await page.goto(url.replace("127.0.0.1", "localhost"));
    await status("Live");
    for (const socket of sockets) socket.destroy();
    await status("Not connected");
    await status("Live");
    assert.equal(await visible(page), 3);
    await other.close();
    between.close();
  },

  async "a token is asked for if the page is guarded"() {
    const { url } = await serve(cluster(3, 2));
    const context = await browser.newContext();
    const page = await context.newPage();
    await page.route(/\/(events|why)/, async (route) => {
      const said = route.request().headers().authorization;
      if (said === "Bearer mine") await route.continue();
      else await route.fulfill({ status: said ? 403 : 401, body: "your user may not get /gpustow" });
    });
    await page.goto(url);
    await page.getByLabel("Token").fill("another's");
    await page.keyboard.press("Enter");
    await page.getByText("your user may not get /gpustow").waitFor();
    await accessible(page, "sign in");
    await page.getByLabel("Token").fill("mine");
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.waitForFunction(() => document.getElementById("status").textContent === "Live");
    assert.equal(await visible(page), 3);
    assert.equal(await page.getByLabel("Token").isVisible(), false);
    await page.keyboard.press("3");
    await page.getByRole("button", { name: "Why does" }).first().click();
    await page.waitForSelector("pre");
    await context.close();
  },

  async "5,000 nodes with 8 GPUs each are painted"() {
    await paint(5_000);
  },

  async "12,500 nodes with 8 GPUs each are painted"() {
    await paint(12_500);
  },
};

async function paint(nodes) {
  const { url } = await serve(cluster(nodes, 8));
  const context = await browser.newContext({ viewport: { width: 1400, height: 900 } });
  const page = await context.newPage();
  await page.addInitScript(() => {
    const parse = JSON.parse;
    JSON.parse = (text) => {
      const began = performance.now();
      JSON.parse = parse;
      requestAnimationFrame(() => setTimeout(() => { window.painted = performance.now() - began; }));
      return parse(text);
    };
  });
  await page.goto(url);
  await page.waitForFunction(() => window.painted !== undefined, undefined, { timeout: 120_000 });
  assert.equal(await page.locator("section.node").count(), nodes);
  const last = page.locator("section.node").last();
  await last.scrollIntoViewIfNeeded();
  await last.locator(".gpu, button").first().waitFor();
  const painted = await page.evaluate(() => Math.round(window.painted));
  console.log(`      ${nodes} nodes: painted ${painted} ms after the first event was read`);
  await context.close();
}

async function screenshots(folder) {
  const { url } = await serve(cluster(9, true));
  for (const [name, tab, scheme] of [["page", "GPUs", "light"], ["page-dark", "GPUs", "dark"], ["page-waiting", "Waiting", "light"]]) {
    const page = await open(url, { scheme, width: 1200, height: 720, scale: 2 });
    await page.getByRole("tab", { name: tab }).click();
    if (tab === "Waiting") {
      await page.getByRole("button", { name: "Why does" }).first().click();
      await page.waitForSelector("pre");
    }
    await page.screenshot({ path: join(folder, `${name}.png`) });
  }
}

let failed = 0;
try {
  if (option === "--screenshots") {
    await screenshots(folder);
  } else {
    for (const [name, check] of Object.entries(cases)) {
      try {
        await check();
        assert.deepEqual(opened.flatMap(({ wrong }) => wrong), []);
        console.log(`ok    ${name}`);
      } catch (error) {
        failed += 1;
        console.log(`FAIL  ${name}\n${error.stack}`);
      } finally {
        for (const { context } of opened.splice(0)) await context.close();
      }
    }
  }
} finally {
  await browser.close();
  for (const child of running) child.kill();
  rmSync(scratch, { recursive: true });
}
process.exit(failed ? 1 : 0);
