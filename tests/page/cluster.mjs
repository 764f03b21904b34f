// Clusters as kubectl would print them, made up and always the same but for the time.

const MIB = "gpustow.dev/gpu-mem";
const MODELS = [
  ["NVIDIA A100-SXM4-80GB", 81920, 8], ["NVIDIA H100 80GB HBM3", 81559, 8],
  ["NVIDIA L4", 23034, 4], ["NVIDIA L40S", 46068, 4], ["Tesla T4", 15360, 2],
];
const TEAMS = ["search", "vision", "speech", "ads", "research", "platform"];
const WORK = ["notebook", "serve", "train", "embed", "rank", "eval"];

const ago = (minutes) => new Date(Date.now() - minutes * 60_000).toISOString();

function random(seed) {
  let state = seed >>> 0;
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

export function pod(namespace, name, mib, { node, uuid, charged = mib, message, created = ago(240), set } = {}) {
  const assignment = { version: 1, gpus: [{ uuid, mib: charged }], containers: { main: [uuid] } };
  return {
    kind: "Pod",
    metadata: {
      namespace, name, uid: `uid-${namespace}-${name}`, creationTimestamp: created,
      ownerReferences: set ? [{ apiVersion: "apps/v1", kind: "StatefulSet", name: set, uid: set, controller: true }] : [],
      annotations: node ? { "gpustow.dev/assignment": JSON.stringify(assignment) } : {},
    },
    spec: {
      schedulerName: "gpustow-scheduler", nodeName: node,
      containers: [{ name: "main", resources: { limits: { [MIB]: String(mib) }, requests: { cpu: "1", memory: "2Gi" } } }],
    },
    status: {
      phase: node ? "Running" : "Pending",
      conditions: message ? [{ type: "PodScheduled", status: "False", reason: "Unschedulable", message }] : [],
    },
  };
}

/// What a StatefulSet's pods used, and should request.
export function history(namespace, name, mib) {
  return {
    kind: "GpuWorkload", apiVersion: "gpustow.dev/v1alpha1", metadata: { namespace, name: `statefulset-${name}` },
    spec: {
      targetRef: { kind: "StatefulSet", name },
      containers: [{
        name: "main", image: "", gpuMiB: 81920, advice: { requestMiB: mib, p95MiB: mib, p99MiB: mib, limitMiB: mib, enough: true },
        history: { buckets: {}, total: 0, first: 0, last: 0, samples: 1440, peakMiB: mib },
      }],
    },
  };
}

/// Every fiftieth node's agent is silent.
const silent = (number) => number % 50 === 7;

/// `gpus`: true for as many as the model's machines have, or a number.
export function cluster(nodes, gpus) {
  const next = random(7);
  const items = [];
  for (let number = 0; number < nodes; number += 1) {
    const [model, total, usual] = MODELS[next(MODELS.length)];
    const name = `gpu-${String(number).padStart(4, "0")}`;
    const cards = [];
    const count = gpus === true ? usual : gpus;
    for (let index = 0; index < count; index += 1) {
      const uuid = `GPU-${name}-${index}`;
      const capacity = total - 512;
      let left = capacity;
      const uses = [];
      for (let place = 0; place < 4 && (place === 0 || next(10) < 8); place += 1) {
        const mib = Math.min(left, 1024 * (1 + next(Math.max(2, Math.floor(capacity / 2048)))));
        if (mib < 1024) break;
        left -= mib;
        const team = TEAMS[next(TEAMS.length)];
        const made = pod(team, `${WORK[next(WORK.length)]}-${number}-${index}${"abcd"[place]}`, mib, { node: name, uuid });
        items.push(made);
        uses.push({ uid: made.metadata.uid, usedMiB: Math.floor((mib * (20 + next(80))) / 100) });
      }
      const sick = next(30) === 0;
      cards.push({
        uuid, index, model, totalMiB: total, reservedMiB: 512, healthy: !sick, pods: uses,
        unmanagedMiB: next(15) === 0 ? Math.min(left, 4096) : 0,
        ...(sick ? { reason: "XID 79: fallen off the bus" } : {}),
      });
    }
    items.push({ kind: "GpuNode", apiVersion: "gpustow.dev/v1alpha1", metadata: { name }, spec: {}, status: {
      heartbeat: ago(silent(number) ? 10 : 0), driver: "570.86.15", gpus: cards,
    } });
    items.push({ kind: "Node", metadata: { name, labels: {} }, spec: {}, status: {
      allocatable: { cpu: "128", memory: "1Ti", [MIB]: String(cards.length * (total - 512)) },
    } });
  }
  const message = `0/${nodes} nodes are available: ${nodes} not enough free memory on any one GPU.`;
  for (let number = 0; number < 12; number += 1) {
    const team = TEAMS[next(TEAMS.length)];
    items.push(pod(team, `waiting-${number}`, 80896, { message, created: ago(12 + number) }));
  }
  for (let number = 0; number < 40; number += 1) {
    items.push(pod("serving", `triton-${number}`, 80896, { message, created: ago(3), set: "triton" }));
  }
  return { kind: "List", apiVersion: "v1", items };
}

export const HOSTILE = "<img src=x onerror=\"window.hostile='yes'\">";

export function hostile() {
  const made = cluster(1, 2);
  const node = made.items.find(({ kind }) => kind === "GpuNode");
  node.status.gpus[0].model = HOSTILE;
  Object.assign(node.status.gpus[1], { healthy: false, reason: HOSTILE });
  const uuid = node.status.gpus[0].uuid;
  made.items.push(pod(HOSTILE, HOSTILE, 1024, { node: node.metadata.name, uuid }));
  made.items.push(pod(HOSTILE, "javascript:alert(1)", 999999, { message: HOSTILE }));
  return made;
}
