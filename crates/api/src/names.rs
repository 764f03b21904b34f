//! Every string key that gpustow reads or writes in a cluster. No other file spells one out.

/// API group of the custom resource and prefix of all keys.
pub const GROUP: &str = "gpustow.dev";
/// Version of the custom resource.
pub const VERSION: &str = "v1alpha1";
/// Set by users: the extended resource that a container requests, in whole MiB, as the total over its GPUs.
pub const GPU_MEM: &str = "gpustow.dev/gpu-mem";
/// NVIDIA's own device plugin's resource, which must not be mixed with ours in one container.
pub const NVIDIA_GPU: &str = "nvidia.com/gpu";
/// Is it a GPU, or a part of one, of NVIDIA's or HAMi's device plugin? Others of NVIDIA's resources are network cards,
/// and resources with names that operators choose.
#[must_use]
pub fn is_nvidia_gpu(resource: &str) -> bool {
    let rest = resource.strip_prefix("nvidia.com/");
    rest.is_some_and(|rest| NVIDIA_GPUS.contains(&rest) || rest.starts_with("mig-"))
}
const NVIDIA_GPUS: [&str; 6] = [
    "gpu",
    "gpu.shared",
    "vgpu",
    "gpumem",
    "gpumem-percentage",
    "gpucores",
];
/// The node label with the model of the cards: GPU feature discovery sets it, and pods
/// select by it. Blanks of the model's name are dashes there.
pub const GPU_PRODUCT: &str = "nvidia.com/gpu.product";

/// NVIDIA's driver of dynamic resource allocation: a claim's device of it is a GPU or a part of one.
pub const NVIDIA_DRA_DRIVER: &str = "gpu.nvidia.com";

/// Set by users: pod annotation with the number of GPUs over which the MiB of each requesting container are split
/// evenly.
pub const GPU_COUNT: &str = "gpustow.dev/gpu-count";
/// Set by users: pod annotation with the number of GPUs for one container.
pub const GPU_COUNT_OF: &str = "gpu-count.gpustow.dev/";
/// Set by users: pod annotation with the percentage of each GPU that each requesting container gets. Its MiB are then the
/// least.
pub const GPU_MEM_PERCENTAGE: &str = "gpustow.dev/gpu-mem-percentage";
/// Set by users: pod annotation with the percentage of each GPU for one container.
pub const GPU_MEM_PERCENTAGE_OF: &str = "gpu-mem-percentage.gpustow.dev/";
/// Set by users: pod annotation, `true` for whole GPUs.
pub const EXCLUSIVE: &str = "gpustow.dev/exclusive";
/// Set by users: pod annotation with the MiB that a container may use at most, over all its GPUs, or `max`.
pub const MEM_LIMIT: &str = "gpustow.dev/gpu-mem-limit";
/// Set by users: pod annotation with the MiB that one container may use at most, over all its GPUs, or `max`.
pub const MEM_LIMIT_OF: &str = "gpu-mem-limit.gpustow.dev/";
/// Set by users: pod annotation with the way in which limits are enforced: `driver`, `watch` or `none`.
/// Admission sets it if the administrator has another default than `watch`.
pub const ENFORCE: &str = "gpustow.dev/enforce";
/// Set by users: pod annotation with the hardest action by which memory is reclaimed from the pod: `Event`,
/// `KillProcess` or `Evict`.
pub const RECLAIM_ACTION: &str = "gpustow.dev/reclaim-action";
/// Set by users: pod annotation, `true` if the pod may be evicted against fragmentation, because its controller makes
/// a replacement.
pub const EVICTABLE: &str = "gpustow.dev/evictable";
/// Set by users: pod annotation, `true` while the pod does not need the memory that it requested, and others may borrow
/// all of it. `false` requests it back. It may change while the pod runs.
pub const ASLEEP: &str = "gpustow.dev/asleep";
/// Set by users: pod annotation with a comma list of patterns of models. Each GPU of the pod matches one.
pub const GPU_MODELS: &str = "gpustow.dev/gpu-models";
/// Set by users: pod annotation with a comma list of patterns of models. No GPU of the pod matches one.
pub const NOT_GPU_MODELS: &str = "gpustow.dev/not-gpu-models";
/// Set by users: pod annotation with a comma list of UUIDs of the GPUs that the pod may get.
pub const GPU_UUIDS: &str = "gpustow.dev/gpu-uuids";
/// Set by users: pod annotation with a comma list of UUIDs of the GPUs that the pod does not get.
pub const NOT_GPU_UUIDS: &str = "gpustow.dev/not-gpu-uuids";
/// Set by users: pod annotation. Pods of the namespace with equal values share their GPUs.
pub const GPU_AFFINITY: &str = "gpustow.dev/gpu-affinity";
/// Set by users: pod annotation. Pods of the namespace with equal values never share a GPU.
pub const GPU_ANTI_AFFINITY: &str = "gpustow.dev/gpu-anti-affinity";
/// Set by users: pod annotation with the percentage of the compute of each of its GPUs that the pod may use. Such pods go to
/// GPUs with MPS.
pub const COMPUTE_PERCENT: &str = "gpustow.dev/compute-percent";
/// Set by users: pod annotation, `mig` if the pod gets a MIG instance of its own, which an agent makes for it.
pub const ISOLATION: &str = "gpustow.dev/isolation";
/// Set by users: pod annotation. `alone`: other pods do not start on the pod's GPUs while it starts. `beside`: they may.
pub const START: &str = "gpustow.dev/start";
/// Set by users: pod annotation with the packing policy of this pod.
pub const POLICY: &str = "gpustow.dev/policy";

/// Written by the extender: pod annotation of the Binding with the GPUs and MiB of each container. The extender's
/// books are made from it.
pub const ASSIGNMENT: &str = "gpustow.dev/assignment";
/// Written by the extender: pod annotation of the Binding with a comma list of GPU UUIDs of the container, which its
/// environment reads.
pub const DEVICES_OF: &str = "devices.gpustow.dev/";
/// Written by the extender: pod annotation of the Binding with the MiB that the container may use of each of its GPUs.
pub const MIB_OF: &str = "mib.gpustow.dev/";
/// Written by the extender: pod annotation of the Binding with the bytes that the container may use of each of its GPUs.
pub const BYTES_OF: &str = "bytes.gpustow.dev/";
/// Written by the extender: pod annotation of the Binding with that memory as a share of the whole GPU, such as `0.1234`.
pub const SHARE_OF: &str = "share.gpustow.dev/";
/// Written by the extender: pod annotation of the Binding with the MiB that MPS lets each process of the container have of each
/// of its GPUs, as `GPU-…=8192M`.
pub const MPS_OF: &str = "mps.gpustow.dev/";
/// Written by the extender in the Binding for NVIDIA's NRI plugin: CDI device names.
pub const CDI_OF: &str = "nvidia.cdi.k8s.io/container.";
/// The prefix of the annotations by which NVIDIA's NRI plugin gives devices to containers.
pub const CDI_DOMAIN: &str = "nvidia.cdi.k8s.io";
/// Vendor and class of NVIDIA's CDI devices.
pub const CDI_KIND: &str = "nvidia.com/gpu";
/// Written by the agent: pod annotation with the devices on which NVML really saw the pod.
pub const CONFIRMED: &str = "gpustow.dev/confirmed";
/// Written by the extender: annotation of an unbound pod with the term of the leader that may bind it.
pub const EPOCH: &str = "gpustow.dev/epoch";

/// Written by the extender: annotation of an unbound pod whose bind had an unknown outcome, and of a pod that a new
/// leader marks. A change makes a Binding that is still under way fail.
pub const FENCE: &str = "gpustow.dev/fence";
/// Written by the extender: annotation of the extender's Lease whose holder left with every bind done.
pub const LEFT_CLEANLY: &str = "gpustow.dev/left-cleanly";

/// Written by the extender: pod condition whose change wakes a waiting pod. On a running pod with the annotation `gpustow.dev/asleep` it
/// is true once all memory that the pod requested is free.
pub const AVAILABLE_CONDITION: &str = "gpustow.dev/MemoryAvailable";

/// Its reason where the same write nominates the pod to a node that kube-scheduler did not show the extender: the
/// nomination is the extender's, who also ends it.
pub const NOMINATED: &str = "NodeNominated";

/// Written by the extender: condition on a waiting pod for which memory is reserved. Its message is for people.
pub const RESERVED_CONDITION: &str = "gpustow.dev/MemoryReserved";
/// Written by the extender: annotation of such a pod with the reserved GPUs, the node and the end of the reservation.
pub const RESERVATION: &str = "gpustow.dev/reservation";
/// Reason of the extender's Event on a pod for which it reserves memory.
pub const MEMORY_RESERVED: &str = "GpuMemoryReserved";
/// Written by the extender: condition on a pod from which memory is reclaimed that it uses beyond its request. Its
/// last transition identifies the demand; its reason names the action.
pub const RECLAIM_CONDITION: &str = "gpustow.dev/Reclaiming";
/// Kubernetes' own condition on a pod that must terminate for others.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";
/// Its reason if the extender preempts the pod for one that waits for fragmented memory.
pub const PREEMPTED: &str = "PreemptionByGpustow";

/// Its reason if the extender evicts the pod for one that waits for fragmented memory.
pub const DEFRAGMENTED: &str = "DefragmentationByGpustow";

/// Written by the extender: label and finalizer of a DeviceTaintRule that keeps ResourceClaims off a GPU that pods may get,
/// and the key of its taint.
pub const CLAIMS_FENCE: &str = "gpustow.dev/claims-fence";
/// Written by the extender: annotation of such a rule with the node of the GPU.
pub const FENCED_NODE: &str = "gpustow.dev/fenced-node";
/// Written by the extender: annotation of such a rule with the UUID of the GPU.
pub const FENCED_GPU: &str = "gpustow.dev/fenced-gpu";

/// Written by the extender: label of a placeholder, a pod that autoscalers see and that fits on no present node.
pub const PLACEHOLDER: &str = "gpustow.dev/placeholder";
/// Written by the extender: annotation of a placeholder with the UIDs of the pods that wait for its node, its owner's
/// first.
pub const PLACEHOLDER_FOR: &str = "gpustow.dev/placeholder-for";
/// PriorityClass of placeholders.
pub const PLACEHOLDER_CLASS: &str = "gpustow-placeholder";
/// Image of placeholders, which never runs.
pub const PLACEHOLDER_IMAGE: &str = "registry.k8s.io/pause:3.10";

/// Written by admission: label of pods that request GPU memory.
pub const MANAGED_LABEL: &str = "gpustow.dev/managed";

/// Written by the agent: node label with the model of the node's GPUs, if it is one.
pub const GPU_MODEL_LABEL: &str = "gpustow.dev/gpu-model";
/// Written by the agent: node label with the MiB of the node's smallest GPU that pods may hold.
pub const GPU_MEMORY_LABEL: &str = "gpustow.dev/gpu-memory";
/// Written by the agent: node label with the number of GPUs.
pub const GPU_COUNT_LABEL: &str = "gpustow.dev/gpus";

/// Written by the agent: node label of nodes whose GPUs it reports. Placeholders go to nodes without it.
pub const KNOWN_LABEL: &str = "gpustow.dev/known";
/// Set by administrators: taint, with the effect `NoSchedule`, that autoscalers give to new nodes. The agent removes it once
/// kube-scheduler knows the node's GPU memory.
pub const STARTUP_TAINT: &str = "gpustow.dev/startup";
/// The node label that names the kind of machine: Kubernetes' own.
pub const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";
/// The node label with the name of its host: Kubernetes' own.
pub const HOSTNAME: &str = "kubernetes.io/hostname";
/// The node labels of GPU feature discovery with the MiB of each GPU and the number of GPUs.
pub const NVIDIA_MEMORY_LABEL: &str = "nvidia.com/gpu.memory";
/// See [`NVIDIA_MEMORY_LABEL`].
pub const NVIDIA_COUNT_LABEL: &str = "nvidia.com/gpu.count";

/// Set by administrators: node annotation with a comma list of UUIDs of GPUs that get no new pods.
pub const CORDONED_GPUS: &str = "gpustow.dev/cordoned-gpus";

/// Written by the extender: node label while GPUs are reserved there, with the informed autoscalers, joined by `_`.
pub const RESERVED_LABEL: &str = "gpustow.dev/reserved";
/// Autoscalers, and the node annotation by whose `"true"` each keeps a node.
pub const SPARE_NODE: [(&str, &str); 2] = [
    (
        "cluster-autoscaler",
        "cluster-autoscaler.kubernetes.io/scale-down-disabled",
    ),
    ("karpenter", "karpenter.sh/do-not-disrupt"),
];
/// API group that is served where Karpenter is installed.
pub const KARPENTER_API_GROUP: &str = "karpenter.sh";

/// Set by users: pod annotation with the version whose annotations the pod has, if it is later than the one that may
/// judge them. Our admission policies have it with the version that generated them.
pub const MADE_FOR: &str = "gpustow.dev/version";

/// Set by administrators: label of a namespace whose containers may see every GPU: `off` keeps the guard out.
pub const GUARD_LABEL: &str = "gpustow.dev/guard";

/// Set by administrators: label of a namespace with the GPU sharer whose requests are translated when pods are created
/// there.
pub const ADOPT_LABEL: &str = "gpustow.dev/adopt";
/// Set by administrators: label of such a namespace with the unit in which the sharer counts memory there: `MiB`, `GiB`, or
/// a number of MiB as `10MiB`, which is Volcano's `gpuMemoryFactor`. gpushare counts in GiB without it, the others in MiB.
pub const ADOPT_UNIT_LABEL: &str = "gpustow.dev/adopt-unit";
/// Set by administrators: label of such a namespace with the MiB that each whole GPU must have at least.
pub const ADOPT_MIB_LABEL: &str = "gpustow.dev/adopt-mib-per-gpu";
/// Set by administrators: label of such a namespace with the MiB of each GPU that HAMi gives to pods that request GPUs alone.
/// Without it they get whole GPUs.
pub const ADOPT_DEFAULT_LABEL: &str = "gpustow.dev/adopt-default-mib";
/// Set by administrators: label of such a namespace with the number of shares that time-slicing makes of a GPU, 1 to 100.
pub const ADOPT_REPLICAS_LABEL: &str = "gpustow.dev/adopt-replicas";
/// Written by admission: annotation of a translated pod with the sharer that its request was written for, and the parts
/// that the translation leaves out.
pub const ADOPTED: &str = "gpustow.dev/adopted";
/// The label of a node by NVIDIA's GPU feature discovery: how many shares time-slicing makes of a GPU.
pub const NVIDIA_REPLICAS: &str = "nvidia.com/gpu.replicas";
/// The resource of Aliyun's gpushare.
pub const GPUSHARE_MEM: &str = "aliyun.com/gpu-mem";
/// The resource of Volcano's vGPU, in a unit of its configuration.
pub const VOLCANO_MEMORY: &str = "volcano.sh/vgpu-memory";
/// Set by administrators: label of a namespace, `advised`, or `p95` or `p99` for a quantile. Its pods with the annotation
/// `gpustow.dev/gpu-mem: auto` get the request that their workload's history advises.
pub const AUTO_LABEL: &str = "gpustow.dev/auto";
/// Set by administrators: annotation of a namespace with the request of such pods without a history, in MiB of each GPU.
pub const AUTO_DEFAULT: &str = "gpustow.dev/auto-default";

/// Written by admission: scheduling gate of queued pods. The extender removes it when they are next and fit.
pub const GATE: &str = "gpustow.dev/queued";
/// Set by administrators: label of a namespace: `off` keeps its pods out of the queue.
pub const QUEUE_LABEL: &str = "gpustow.dev/queue";

/// Labels that name the group with which a pod is scheduled or not at all, as the coscheduling plugin
/// reads them.
pub const POD_GROUP_LABELS: [&str; 2] = [
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
];

/// Every annotation of pods that is ours; others of our group are misspelt, or a later version's.
pub const POD_KEYS: [&str; 26] = [
    ADOPTED,
    GPU_COUNT,
    GPU_MEM_PERCENTAGE,
    EXCLUSIVE,
    MEM_LIMIT,
    ENFORCE,
    RECLAIM_ACTION,
    EVICTABLE,
    ASLEEP,
    GPU_MODELS,
    NOT_GPU_MODELS,
    GPU_UUIDS,
    NOT_GPU_UUIDS,
    GPU_AFFINITY,
    GPU_ANTI_AFFINITY,
    COMPUTE_PERCENT,
    ISOLATION,
    START,
    POLICY,
    MADE_FOR,
    ASSIGNMENT,
    CONFIRMED,
    EPOCH,
    FENCE,
    RESERVATION,
    PLACEHOLDER_FOR,
];
/// The prefixes of annotations that the name of a container follows.
pub const POD_KEYS_OF: [&str; 8] = [
    GPU_COUNT_OF,
    GPU_MEM_PERCENTAGE_OF,
    MEM_LIMIT_OF,
    DEVICES_OF,
    MIB_OF,
    BYTES_OF,
    SHARE_OF,
    MPS_OF,
];

/// Environment variable that the NVIDIA container toolkit reads.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Written by the agent: kind of the CDI devices of MIG instances. The UID of its pod names each.
pub const CDI_MIG: &str = "gpustow.dev/mig";
/// Environment variable by which it chooses the driver's libraries.
pub const DRIVER_CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// Environment variable of which the toolkit's hook makes the limit of a container, MiB of each card.
pub const MEMORY_LIMIT: &str = "NVIDIA_GPU_MEMORY_LIMIT";
/// Environment variable of which it makes the memory that the driver keeps for the container.
pub const MEMORY_REQUEST: &str = "NVIDIA_GPU_MEMORY_REQUEST";

/// Environment variable with the directory of the pipes to MPS's control daemon.
pub const MPS_PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Environment variable with the percentage of a GPU's multiprocessors that a client of MPS may use.
pub const MPS_THREADS: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
/// Environment variable of a client of MPS: the value of [`MPS_OF`].
pub const MPS_MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// Where a node, and each container with a share of compute, has the pipes of MPS's control daemon.
pub const MPS_PIPES_DIRECTORY: &str = "/run/gpustow/mps/pipe";
/// Where a node has the shared memory of MPS, which such containers have as `/dev/shm`.
pub const MPS_SHM_DIRECTORY: &str = "/run/gpustow/mps/shm";
/// The volumes of pods with a share of compute that hold these two.
pub const MPS_PIPES_VOLUME: &str = "gpustow-mps-pipe";
/// See [`MPS_PIPES_VOLUME`].
pub const MPS_SHM_VOLUME: &str = "gpustow-mps-shm";

/// Environment variable of containers that ask: the value of [`MIB_OF`].
pub const MEM_MIB: &str = "GPUSTOW_MEM_MIB";
/// Environment variable of containers that ask: the value of [`BYTES_OF`].
pub const MEM_BYTES: &str = "GPUSTOW_MEM_BYTES";
/// Environment variable of containers that ask: the value of [`SHARE_OF`].
pub const MEM_SHARE: &str = "GPUSTOW_MEM_SHARE";

/// Namespace of everything that the manifests install.
pub const NAMESPACE: &str = "gpustow-system";
/// The policy that keeps the gate on queued pods.
pub const QUEUE: &str = "gpustow-queue";
/// Service there behind which the webhook is.
pub const WEBHOOK: &str = "gpustow-webhook";
/// Secret there with the webhook's certificate.
pub const WEBHOOK_TLS: &str = "gpustow-webhook-tls";
/// The MutatingWebhookConfiguration. The API server calls configurations in the order of their names, and ours must see the changes of
/// others.
pub const WEBHOOK_CONFIGURATION: &str = "zz-gpustow";
/// Written by the extender: annotation of the Secret of the webhook with the time at which it makes another
/// certificate.
pub const RENEW_AFTER: &str = "gpustow.dev/renew-after";
/// Name of the second scheduler.
pub const SCHEDULER: &str = "gpustow-scheduler";
/// Field manager and event source of the extender.
pub const EXTENDER: &str = "gpustow-extender";
/// Field manager and event source of the agent.
pub const AGENT: &str = "gpustow-agent";
