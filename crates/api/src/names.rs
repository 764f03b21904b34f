//! Every string key that gpustow reads or writes in a cluster. No other file spells one out.

/// API group of the custom resource and prefix of all keys.
pub const GROUP: &str = "gpustow.dev";
/// Version of the custom resource.
pub const VERSION: &str = "v1alpha1";
/// Extended resource that containers ask for: whole MiB, total over the container's GPUs.
pub const GPU_MEM: &str = "gpustow.dev/gpu-mem";
/// NVIDIA's own device plugin's resource, which must not be mixed with ours in one container.
pub const NVIDIA_GPU: &str = "nvidia.com/gpu";
/// The node label that says which model the cards are: GPU feature discovery sets it, and pods
/// select by it. Blanks of the model's name are dashes there.
pub const GPU_PRODUCT: &str = "nvidia.com/gpu.product";

/// NVIDIA's driver of dynamic resource allocation: a claim's device of it is a GPU or a part of one.
pub const NVIDIA_DRA_DRIVER: &str = "gpu.nvidia.com";

/// Set by users: number of GPUs over which each asking container's MiB are split evenly.
pub const GPU_COUNT: &str = "gpustow.dev/gpu-count";
/// Set by users: the same for one container, whose name follows.
pub const GPU_COUNT_OF: &str = "gpu-count.gpustow.dev/";
/// Set by users: whole cards.
pub const EXCLUSIVE: &str = "gpustow.dev/exclusive";
/// Set by users: how many MiB a container may use at most, over all its GPUs, or `max`.
pub const MEM_LIMIT: &str = "gpustow.dev/gpu-mem-limit";
/// Set by users: the same for one container, whose name follows.
pub const MEM_LIMIT_OF: &str = "gpu-mem-limit.gpustow.dev/";
/// Set by users, or by admission where the administrator has a default: who sees to it that containers keep
/// their limit.
pub const ENFORCE: &str = "gpustow.dev/enforce";
/// Set by users: the hardest action by which memory is reclaimed from the pod.
pub const RECLAIM_ACTION: &str = "gpustow.dev/reclaim-action";
/// Set by users: the pod may be evicted against fragmentation, because its controller makes a replacement.
pub const EVICTABLE: &str = "gpustow.dev/evictable";
/// Set by users: comma list of patterns of models, of which each GPU of the pod has one.
pub const GPU_MODELS: &str = "gpustow.dev/gpu-models";
/// Set by users: comma list of patterns of models that no GPU of the pod has.
pub const NOT_GPU_MODELS: &str = "gpustow.dev/not-gpu-models";
/// Set by users: comma list of UUIDs of the GPUs that the pod may get.
pub const GPU_UUIDS: &str = "gpustow.dev/gpu-uuids";
/// Set by users: comma list of UUIDs of the GPUs that the pod does not get.
pub const NOT_GPU_UUIDS: &str = "gpustow.dev/not-gpu-uuids";
/// Set by users: pods of the namespace with the same value share their GPUs.
pub const GPU_AFFINITY: &str = "gpustow.dev/gpu-affinity";
/// Set by users: pods of the namespace with the same value share no GPU.
pub const GPU_ANTI_AFFINITY: &str = "gpustow.dev/gpu-anti-affinity";
/// Set by users: the packing policy for this pod.
pub const POLICY: &str = "gpustow.dev/policy";

/// Written by the extender in the Binding: the ledger's source of truth.
pub const ASSIGNMENT: &str = "gpustow.dev/assignment";
/// Written by the extender in the Binding: comma list of GPU UUIDs of the container whose name
/// follows. The container's environment reads it.
pub const DEVICES_OF: &str = "devices.gpustow.dev/";
/// Written by the extender in the Binding: MiB that the container whose name follows may use of each of
/// its GPUs.
pub const MIB_OF: &str = "mib.gpustow.dev/";
/// Written by the extender in the Binding: the same as a share of the whole GPU, as `0.1234`.
pub const SHARE_OF: &str = "share.gpustow.dev/";
/// Written by the extender in the Binding for NVIDIA's NRI plugin: CDI device names.
pub const CDI_OF: &str = "nvidia.cdi.k8s.io/container.";
/// What every annotation begins with by which NVIDIA's NRI plugin gives devices to containers.
pub const CDI_DOMAIN: &str = "nvidia.cdi.k8s.io";
/// Vendor and class of NVIDIA's CDI devices.
pub const CDI_KIND: &str = "nvidia.com/gpu";
/// Written by the agent: the devices on which NVML really saw the pod.
pub const CONFIRMED: &str = "gpustow.dev/confirmed";
/// Written by the extender in an unbound pod: the epoch that may bind it.
pub const EPOCH: &str = "gpustow.dev/epoch";

/// Written by the extender in an unbound pod whose bind had an unknown outcome: changes, so that a
/// Binding still under way fails.
pub const FENCE: &str = "gpustow.dev/fence";
/// Annotation of the extender's Lease: its holder left with every bind done.
pub const LEFT_CLEANLY: &str = "gpustow.dev/left-cleanly";

/// Written by the extender: condition whose change wakes a waiting pod.
pub const AVAILABLE_CONDITION: &str = "gpustow.dev/MemoryAvailable";

/// Its reason where the same write nominates the pod to a node that kube-scheduler did not show the extender: the
/// nomination is the extender's, who also ends it.
pub const NOMINATED: &str = "NodeNominated";

/// Written by the extender: condition on a waiting pod for which memory is reserved; its message is for people.
pub const RESERVED_CONDITION: &str = "gpustow.dev/MemoryReserved";
/// Written by the extender beside that condition: what is reserved, on which node and until when ([`Reservation`](crate::reserved)).
pub const RESERVATION: &str = "gpustow.dev/reservation";
/// Reason of the extender's Event on a pod for which it reserves memory.
pub const MEMORY_RESERVED: &str = "GpuMemoryReserved";
/// Written by the extender: condition on a pod from which memory is reclaimed that it uses beyond its request.
/// Its last transition says which demand this is; its reason, which action follows.
pub const RECLAIM_CONDITION: &str = "gpustow.dev/Reclaiming";
/// Kubernetes' own condition on a pod that must terminate for others.
pub const DISRUPTION_TARGET: &str = "DisruptionTarget";
/// Its reason if the extender preempts the pod for one that waits for fragmented memory.
pub const PREEMPTED: &str = "PreemptionByGpustow";

/// Its reason if the extender evicts the pod for one that waits for fragmented memory.
pub const DEFRAGMENTED: &str = "DefragmentationByGpustow";

/// Label that the extender sets on a placeholder: a pod that autoscalers see and no node takes.
pub const PLACEHOLDER: &str = "gpustow.dev/placeholder";
/// Annotation of a placeholder: UIDs of the pods that wait for its node, its owner's first.
pub const PLACEHOLDER_FOR: &str = "gpustow.dev/placeholder-for";
/// PriorityClass of placeholders.
pub const PLACEHOLDER_CLASS: &str = "gpustow-placeholder";

/// Label that the admission policy sets on pods that ask for GPU memory.
pub const MANAGED_LABEL: &str = "gpustow.dev/managed";

/// Node label written by the agent: the model of the node's cards, if it is one.
pub const GPU_MODEL_LABEL: &str = "gpustow.dev/gpu-model";
/// Node label written by the agent: MiB of the node's smallest card that pods may hold.
pub const GPU_MEMORY_LABEL: &str = "gpustow.dev/gpu-memory";
/// Node label written by the agent: number of cards.
pub const GPU_COUNT_LABEL: &str = "gpustow.dev/gpus";

/// Node label written by the agent: it reports the node's GPUs. Placeholders go to nodes without it.
pub const KNOWN_LABEL: &str = "gpustow.dev/known";
/// The node label that names the kind of machine: Kubernetes' own.
pub const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";
/// The node label with the name of its host: Kubernetes' own.
pub const HOSTNAME: &str = "kubernetes.io/hostname";
/// The node labels that say how many MiB each GPU has and how many GPUs there are: GPU feature discovery's.
pub const NVIDIA_MEMORY_LABEL: &str = "nvidia.com/gpu.memory";
/// See [`NVIDIA_MEMORY_LABEL`].
pub const NVIDIA_COUNT_LABEL: &str = "nvidia.com/gpu.count";

/// Node annotation set by administrators: comma list of UUIDs of GPUs that take no new pods.
pub const CORDONED_GPUS: &str = "gpustow.dev/cordoned-gpus";

/// Node label written by the extender while GPUs are reserved there: the autoscalers that it told so, joined by `_`.
pub const RESERVED_LABEL: &str = "gpustow.dev/reserved";
/// Autoscalers, and the node annotation by whose `"true"` each keeps a node.
pub const SPARE_NODE: [(&str, &str); 2] = [
    (
        "cluster-autoscaler",
        "cluster-autoscaler.kubernetes.io/scale-down-disabled",
    ),
    ("karpenter", "karpenter.sh/do-not-disrupt"),
];

/// Annotation of our admission policies: the version that generated them. Set by users on pods: the
/// version whose annotations they bear, where it is later than the one that may judge them.
pub const MADE_FOR: &str = "gpustow.dev/version";

/// Label of a namespace whose containers may see every GPU: `off` there keeps the opt-in guard out.
pub const GUARD_LABEL: &str = "gpustow.dev/guard";

/// Label of a namespace: the GPU sharer whose requests are translated when pods are created there.
pub const ADOPT_LABEL: &str = "gpustow.dev/adopt";
/// Label of such a namespace: `MiB` if gpushare counts in MiB there, else it counts in GiB.
pub const ADOPT_UNIT_LABEL: &str = "gpustow.dev/adopt-unit";
/// Label of such a namespace: the MiB that each whole GPU must have at least.
pub const ADOPT_MIB_LABEL: &str = "gpustow.dev/adopt-mib-per-gpu";
/// Annotation of a translated pod: the sharer that its request was written for, and what the translation leaves out.
pub const ADOPTED: &str = "gpustow.dev/adopted";
/// The resource of Aliyun's gpushare.
pub const GPUSHARE_MEM: &str = "aliyun.com/gpu-mem";
/// Label of a namespace, `p95` or `p99`: its pods with the annotation [`GPU_MEM`]`: auto` get what their workload's
/// history advises at that quantile.
pub const AUTO_LABEL: &str = "gpustow.dev/auto";
/// Annotation of a namespace: what such pods get without a history, in MiB of each GPU.
pub const AUTO_DEFAULT: &str = "gpustow.dev/auto-default";

/// Scheduling gate of queued pods: the extender removes it when their turn has come.
pub const GATE: &str = "gpustow.dev/queued";
/// Label of a namespace: `off` there keeps its pods out of the queue.
pub const QUEUE_LABEL: &str = "gpustow.dev/queue";

/// Labels that name the group with which a pod is scheduled or not at all, as the coscheduling plugin
/// reads them.
pub const POD_GROUP_LABELS: [&str; 2] = [
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
];

/// Every annotation of pods that is ours; others of our group are misspelt, or a later version's.
pub const POD_KEYS: [&str; 21] = [
    ADOPTED,
    GPU_COUNT,
    EXCLUSIVE,
    MEM_LIMIT,
    ENFORCE,
    RECLAIM_ACTION,
    EVICTABLE,
    GPU_MODELS,
    NOT_GPU_MODELS,
    GPU_UUIDS,
    NOT_GPU_UUIDS,
    GPU_AFFINITY,
    GPU_ANTI_AFFINITY,
    POLICY,
    MADE_FOR,
    ASSIGNMENT,
    CONFIRMED,
    EPOCH,
    FENCE,
    RESERVATION,
    PLACEHOLDER_FOR,
];
/// Those that the name of a container follows.
pub const POD_KEYS_OF: [&str; 5] = [GPU_COUNT_OF, MEM_LIMIT_OF, DEVICES_OF, MIB_OF, SHARE_OF];

/// Environment variable that the NVIDIA container toolkit reads.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Environment variable by which it chooses the driver's libraries.
pub const DRIVER_CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// Environment variable of which the toolkit's hook makes the limit of a container, MiB of each card.
pub const MEMORY_LIMIT: &str = "NVIDIA_GPU_MEMORY_LIMIT";
/// Environment variable of which it makes what the driver keeps for the container against its neighbours.
pub const MEMORY_REQUEST: &str = "NVIDIA_GPU_MEMORY_REQUEST";

/// Environment variable of containers that ask: what [`MIB_OF`] says.
pub const MEM_MIB: &str = "GPUSTOW_MEM_MIB";
/// Environment variable of containers that ask: what [`SHARE_OF`] says.
pub const MEM_SHARE: &str = "GPUSTOW_MEM_SHARE";

/// Namespace of everything that the manifests install.
pub const NAMESPACE: &str = "gpustow-system";
/// The admission policies, and the webhook, that queue new pods.
pub const QUEUE: &str = "gpustow-queue";
/// Service there behind which the webhook is.
pub const WEBHOOK: &str = "gpustow-webhook";
/// Secret there with the webhook's certificate.
pub const WEBHOOK_TLS: &str = "gpustow-webhook-tls";
/// The MutatingWebhookConfiguration.
pub const WEBHOOK_CONFIGURATION: &str = "gpustow";
/// Annotation of that Secret, written by the extender: when it makes another certificate.
pub const RENEW_AFTER: &str = "gpustow.dev/renew-after";
/// Name of the second scheduler.
pub const SCHEDULER: &str = "gpustow-scheduler";
/// Field manager and event source of the extender.
pub const EXTENDER: &str = "gpustow-extender";
/// Field manager and event source of the agent.
pub const AGENT: &str = "gpustow-agent";
