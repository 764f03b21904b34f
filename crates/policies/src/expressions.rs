//! CEL that policies share.

/// Expressions that several policies share. The first may name those after it.
pub(crate) const SHARED: [(&str, &str); 44] = [
    // What translates the request of each container: variables `replaced` are the resources that go, `translated` the
    // containers with their GPUs and MiB.
    ("ADOPT_PATCH", include_str!("../policies/adopt-patch.cel")),
    // The MiB that a whole GPU must have at least.
    (
        "ADOPT_MIB",
        r#"[namespaceObject.metadata.?labels[?"{{ADOPT_MIB_LABEL}}"].orValue("")]
        .map(it, it.matches("^[1-9][0-9]{0,6}$") ? int(it) : 1024)[0]"#,
    ),
    // Of container c: does it request HAMi's GPUs, and memory of them or a percentage of it?
    (
        "HAMI_ASKS",
        r#"["nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage"].exists(key,
          c.?resources.?limits[?key].orValue("0") != "0")"#,
    ),
    (
        "HAMI_PARTIAL",
        r#"(c.?resources.?limits[?"nvidia.com/gpumem"].orValue("0") != "0" ||
          !(c.?resources.?limits[?"nvidia.com/gpumem-percentage"].orValue("0") in ["0", "100"]))"#,
    ),
    // Requests of HAMi for which gpustow would choose other GPUs.
    (
        "HAMI_UNTRANSLATABLE",
        r#"({{ALL}}.exists(c, c.?resources.?limits[?"nvidia.com/gpumem"].orValue("0") == "0" && {{HAMI_PARTIAL}} &&
          !c.resources.limits["nvidia.com/gpumem-percentage"].matches("^[1-9][0-9]?$")) ||
        {{ALL}}.exists(c, {{HAMI_PARTIAL}}) && {{ALL}}.exists(c, {{HAMI_ASKS}} && !{{HAMI_PARTIAL}}))"#,
    ),
    // The same of Volcano, and pods that Volcano schedules as a group.
    (
        "VOLCANO_ASKS",
        r#"c.?resources.?limits[?"volcano.sh/vgpu-number"].orValue("0") != "0""#,
    ),
    (
        "VOLCANO_PARTIAL",
        r#"(c.?resources.?limits[?"volcano.sh/vgpu-memory"].orValue("0") != "0" ||
          !(c.?resources.?limits[?"volcano.sh/vgpu-memory-percentage"].orValue("0") in ["0", "100"]))"#,
    ),
    (
        "VOLCANO_UNTRANSLATABLE",
        r#"(object.metadata.?annotations[?"scheduling.k8s.io/group-name"].orValue("") != "" ||
        {{ALL}}.exists(c, {{VOLCANO_ASKS}} && c.resources.limits[?"volcano.sh/vgpu-memory"].orValue("0") == "0" &&
          {{VOLCANO_PARTIAL}} &&
          !c.resources.limits["volcano.sh/vgpu-memory-percentage"].matches("^[1-9][0-9]?$")) ||
        {{ALL}}.exists(c, {{VOLCANO_ASKS}} && {{VOLCANO_PARTIAL}}) &&
        {{ALL}}.exists(c, {{VOLCANO_ASKS}} && !{{VOLCANO_PARTIAL}}))"#,
    ),
    // HAMi's annotations that choose GPUs, in gpustow's words. Its names of models begin with the maker's twice.
    (
        "ADOPT_CHOICES",
        r#"[
            ["nvidia.com/use-gputype", "{{GPU_MODELS}}", "*"], ["nvidia.com/nouse-gputype", "{{NOT_GPU_MODELS}}", "*"],
            ["nvidia.com/use-gpuuuid", "{{GPU_UUIDS}}", ""], ["nvidia.com/nouse-gpuuuid", "{{NOT_GPU_UUIDS}}", ""]
          ].filter(it, object.metadata.?annotations[?it[0]].orValue("").matches("[^, \\t]") &&
            !object.metadata.annotations[?it[1]].hasValue()).map(it, JSONPatch{
              op: "add", path: "/metadata/annotations/" + jsonpatch.escapeKey(it[1]),
              value: object.metadata.annotations[it[0]].split(",").map(entry, entry.trim()).filter(entry, entry != "")
                .map(entry, it[2] + (entry.startsWith("NVIDIA-") ? entry.substring(7) : entry) + it[2]).join(",")
          })"#,
    ),
    // Of a resource in the limits of container c: does another sharer answer it?
    (
        "FOREIGN",
        r#"c.resources.limits[key] != "0" && (key.startsWith("volcano.sh/vgpu-") ||
        key in ["{{GPUSHARE_MEM}}", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"] ||
        key == "nvidia.com/gpu" && variables.source == "hami")"#,
    ),
    // What pods and templates of pods are held to.
    (
        "RULES_VARIABLES",
        include_str!("../policies/rules-variables.yaml"),
    ),
    (
        "STRANGE_VARIABLES",
        include_str!("../policies/strange-variables.yaml"),
    ),
    // Of a pod whose amount follows from its workload's history.
    (
        "AUTO_VARIABLES",
        include_str!("../policies/auto-variables.yaml"),
    ),
    (
        "AUTO_RESOURCES",
        r#"(has(variables.container.resources) ? [] : [JSONPatch{op: "add", path: variables.path, value: {}}]) +
          (variables.container.?resources.?limits.hasValue() ? [] : [JSONPatch{op: "add", path: variables.path + "/limits", value: {}}]) +
          (variables.container.?resources.?requests.hasValue() ? [] : [JSONPatch{op: "add", path: variables.path + "/requests", value: {}}])"#,
    ),
    // The containers that a request brings, with the paths that patches and messages name.
    ("CONTAINERS_PATHS", include_str!("../policies/paths.cel")),
    ("CONTAINERS_FIELDS", include_str!("../policies/fields.cel")),
    // The ServiceAccounts that write what is the extender's.
    (
        "EXTENDERS",
        r#"["system:serviceaccount:{{NAMESPACE}}:{{SCHEDULER}}", "system:serviceaccount:{{NAMESPACE}}:{{EXTENDER}}"]"#,
    ),
    // Does the pod have the queue's scheduling gate?
    (
        "GATED",
        r#"object.spec.?schedulingGates.orValue([]).exists(it, it.name == "{{GATE}}")"#,
    ),
    // Is the pod a placeholder, by its label?
    (
        "HOLDS_PLACE",
        r#"object.metadata.?labels[?"{{PLACEHOLDER}}"].hasValue()"#,
    ),
    // What only gpustow writes of the containers whose names are there.
    (
        "KEYS_OF",
        r#"variables.named.map(name, "{{DEVICES_OF}}" + name) +
        variables.named.map(name, "{{MIB_OF}}" + name) +
        variables.named.map(name, "{{SHARE_OF}}" + name) +
        variables.named.map(name, "{{MPS_OF}}" + name) +
        variables.named.map(name, "{{CDI_OF}}" + name) +
        (size(variables.named) > 0 ? ["{{CDI_DOMAIN}}", "{{CDI_DOMAIN}}/pod"] : [])"#,
    ),
    // Of the asking containers those that the driver is to hold to a limit, and the MiB of each GPU.
    (
        "LIMITED",
        r#"variables.wishes.filter(wish, wish.limit != "max").map(wish, {
          "path": dyn(wish.path), "is": dyn(wish.is), "mib": dyn(string((!wish.said ? wish.mib :
            wish.limit.matches("^[0-9]{1,9}$") ? int(wish.limit) : 0) / wish.gpus))
        })"#,
    ),
    (
        "LIMITS_PATCH",
        r#"variables.limited.filter(it, !it.is.?env.orValue([]).exists(e, e.name == "{{MEMORY_LIMIT}}")).map(it,
            JSONPatch{op: "add", path: it.path + "/env/-", value: {
              "name": dyn("{{MEMORY_LIMIT}}"), "value": dyn(it.mib)
            }}) +
          variables.limited.filter(it, !it.is.?env.orValue([]).exists(e, e.name == "{{MEMORY_REQUEST}}")).map(it,
            JSONPatch{op: "add", path: it.path + "/env/-", value: {
              "name": dyn("{{MEMORY_REQUEST}}"), "value": dyn("0")
            }})"#,
    ),
    // The pod's volumes for MPS: name, directory of the node, and where containers have it.
    (
        "MPS_VOLUMES",
        r#"[["{{MPS_PIPES_VOLUME}}", "{{MPS_PIPES_DIRECTORY}}", "{{MPS_PIPES_DIRECTORY}}"],
            ["{{MPS_SHM_VOLUME}}", "{{MPS_SHM_DIRECTORY}}", "/dev/shm"]]"#,
    ),
    // Of variable e of container c, which asks: is it one of MPS as gpustow sets it?
    (
        "IS_MPS",
        r#"(e.name == "{{MPS_PIPES}}" && e.?value.orValue("") == "{{MPS_PIPES_DIRECTORY}}" ||
          e.name == "{{MPS_THREADS}}" && e.?value.orValue("") == variables.after["{{COMPUTE_PERCENT}}"] ||
          e.name == "{{MPS_MEMORY}}" &&
            e.?valueFrom.?fieldRef.?fieldPath.orValue("") == "metadata.annotations['{{MPS_OF}}" + c.is.name + "']")"#,
    ),
    // What pods with a share of compute get: volumes, and in the containers that ask their mounts, where gpustow-requests may
    // still find others...
    (
        "MPS_VOLUMES_PATCH",
        r#"size(variables.sharing) == 0 ? [] :
          (has(object.spec.volumes) ? [] : [JSONPatch{op: "add", path: "/spec/volumes", value: []}]) +
          {{MPS_VOLUMES}}.filter(it, !object.spec.?volumes.orValue([]).exists(v, v.name == it[0])).map(it,
            JSONPatch{op: "add", path: "/spec/volumes/-", value: {
              "name": dyn(it[0]), "hostPath": dyn({"path": it[1], "type": "Directory"})
            }}) +
          variables.sharing.filter(c, !has(c.is.volumeMounts)).map(c,
            JSONPatch{op: "add", path: c.path + "/volumeMounts", value: []}) +
          variables.sharing.filter(c, !c.is.?volumeMounts.orValue([]).exists(m, m.mountPath == "{{MPS_PIPES_DIRECTORY}}")).map(c,
            JSONPatch{op: "add", path: c.path + "/volumeMounts/-", value: {
              "name": "{{MPS_PIPES_VOLUME}}", "mountPath": "{{MPS_PIPES_DIRECTORY}}"
            }}) +
          variables.sharing.filter(c, !c.is.?volumeMounts.orValue([]).exists(m, m.mountPath == "/dev/shm")).map(c,
            JSONPatch{op: "add", path: c.path + "/volumeMounts/-", value: {
              "name": "{{MPS_SHM_VOLUME}}", "mountPath": "/dev/shm"
            }})"#,
    ),
    // ... and variables.
    (
        "MPS_PATCH",
        r#"variables.sharing.filter(c, !c.is.?env.orValue([]).exists(e, e.name == "{{MPS_PIPES}}")).map(c,
            JSONPatch{op: "add", path: c.path + "/env/-", value: {
              "name": dyn("{{MPS_PIPES}}"), "value": dyn("{{MPS_PIPES_DIRECTORY}}")
            }}) +
          variables.sharing.filter(c, !c.is.?env.orValue([]).exists(e, e.name == "{{MPS_THREADS}}")).map(c,
            JSONPatch{op: "add", path: c.path + "/env/-", value: {
              "name": dyn("{{MPS_THREADS}}"), "value": dyn(variables.after["{{COMPUTE_PERCENT}}"])
            }}) +
          variables.sharing.filter(c, !c.is.?env.orValue([]).exists(e, e.name == "{{MPS_MEMORY}}")).map(c,
            JSONPatch{op: "add", path: c.path + "/env/-", value: {
              "name": dyn("{{MPS_MEMORY}}"),
              "valueFrom": dyn({"fieldRef": {
                "apiVersion": "v1",
                "fieldPath": "metadata.annotations['{{MPS_OF}}" + c.is.name + "']"
              }})
            }})"#,
    ),
    // Of the pod, not of the request: the containers that ask.
    (
        "WISHING",
        r#"!({{FEW}}) ? [] :
        object.spec.?initContainers.orValue([]).transformList(i, c, {{WANTS}},
          {"path": dyn("spec.initContainers[" + string(i) + "]"), "is": dyn(c)}) +
        object.spec.containers.transformList(i, c, {{WANTS}},
          {"path": dyn("spec.containers[" + string(i) + "]"), "is": dyn(c)})"#,
    ),
    // What each of them asks for, and over how many GPUs; 2^63 - 1 is all that is no less.
    (
        "WISHES",
        r#"variables.wishing.map(c, {
          "path": dyn(c.path), "name": dyn(c.is.name), "is": dyn(c.is),
          "limit": dyn(variables.after[?("{{MEM_LIMIT_OF}}" + c.is.name)].orValue(
            variables.after[?"{{MEM_LIMIT}}"].orValue(""))),
          "said": dyn(("{{MEM_LIMIT_OF}}" + c.is.name) in variables.after || "{{MEM_LIMIT}}" in variables.after),
          "key": dyn(("{{MEM_LIMIT_OF}}" + c.is.name) in variables.after ?
            "{{MEM_LIMIT_OF}}" + string(c.is.name) : "{{MEM_LIMIT}}"),
          "mib": dyn(quantity(c.is.resources.limits["{{GPU_MEM}}"]).isInteger() ?
            quantity(c.is.resources.limits["{{GPU_MEM}}"]).asInteger() : 9223372036854775807),
          "gpus": dyn([variables.after[?("{{GPU_COUNT_OF}}" + c.is.name)].orValue(
              variables.after[?"{{GPU_COUNT}}"].orValue("1"))]
            .map(it, it.matches("^0{0,8}[1-9][0-9]{0,8}$") ? int(it) : 1)[0])
        })"#,
    ),
    // What users say by annotations, as far as a request changes it.
    (
        "CHANGED",
        r#"(["{{GPU_COUNT}}", "{{GPU_MEM_PERCENTAGE}}", "{{COMPUTE_PERCENT}}", "{{ISOLATION}}", "{{EXCLUSIVE}}", "{{POLICY}}", "{{MEM_LIMIT}}", "{{ENFORCE}}", "{{RECLAIM_ACTION}}", "{{EVICTABLE}}"] + {{RULE_KEYS}} +
        variables.wishing.map(c, "{{GPU_COUNT_OF}}" + string(c.is.name)) +
        variables.wishing.map(c, "{{GPU_MEM_PERCENTAGE_OF}}" + string(c.is.name)) +
        variables.wishing.map(c, "{{MEM_LIMIT_OF}}" + string(c.is.name)))
        .filter(key, variables.before[?key] != variables.after[?key])"#,
    ),
    // Those of them that say which GPUs the pod may get.
    (
        "RULE_KEYS",
        r#"["{{GPU_MODELS}}", "{{NOT_GPU_MODELS}}", "{{GPU_UUIDS}}", "{{NOT_GPU_UUIDS}}", "{{GPU_AFFINITY}}", "{{GPU_ANTI_AFFINITY}}"]"#,
    ),
    ("ASKS", "{{ALL}}.exists(c, {{WANTS}})"),
    ("ASKING", "{{ALL}}.filter(c, {{WANTS}})"),
    // The same once gpustow-adopt has translated the pod, or gpustow-auto has given it an amount. The order of policies is open, and a policy is invoked again
    // after another one only if it matched before.
    (
        "MAY_ASK",
        r#"({{AUTO}} || {{ALL}}.exists(c, {{WANTS}} || c.?resources.?limits.orValue({}).exists(key, key == "{{GPUSHARE_MEM}}" ||
        key == "{{NVIDIA_GPU}}" || key.startsWith("nvidia.com/gpumem") || key == "volcano.sh/vgpu-number")))"#,
    ),
    // Another policy gives the pod an amount, before or after this one.
    (
        "AUTO",
        r#"object.metadata.?annotations[?"{{GPU_MEM}}"].orValue("").startsWith("auto")"#,
    ),
    // Of a pod that asks: may it be queued? Neither mirrors of static pods, nor what every node has of its own, nor
    // what a cluster cannot do without.
    (
        "STANDS",
        r#"object.spec.?nodeName.orValue("") == "" && !object.metadata.?ownerReferences.orValue([]).exists(it, it.kind == "DaemonSet" && it.?controller.orValue(false)) && !(object.spec.?priorityClassName.orValue("") in ["system-cluster-critical", "system-node-critical"]) && !{{HOLDS_PLACE}}"#,
    ),
    // Is it cheap to look at every container, and at what each brings?
    (
        "BOUNDED",
        "{{FEW}} && ({{ALL}} + object.spec.?ephemeralContainers.orValue([])).map(c, \
         size(c.?env.orValue([])) + size(c.?resources.?limits.orValue({}))).sum() <= {{MAX_VARIABLES}}",
    ),
    // An update changes the annotations.
    (
        "REANNOTATED",
        "oldObject.metadata.?annotations.orValue({}) != object.metadata.?annotations.orValue({})",
    ),
    (
        "FEW",
        "size(object.spec.containers) + size(object.spec.?initContainers.orValue([])) + \
         size(object.spec.?ephemeralContainers.orValue([])) <= {{MAX_CONTAINERS}}",
    ),
    (
        "ALL",
        "(object.spec.containers + object.spec.?initContainers.orValue([]))",
    ),
    (
        "WANTS",
        r#"c.?resources.?limits[?"{{GPU_MEM}}"].orValue("0") != "0""#,
    ),
    (
        "NVIDIA",
        r#"c.is.?resources.?limits.orValue({}).exists(name, name.startsWith("nvidia.com/") && c.is.resources.limits[name] != "0")"#,
    ),
    (
        "ADDED",
        "!(oldObject != null && oldObject.spec.?ephemeralContainers.orValue([]).exists(old, old.name == c.name))",
    ),
    // Of an annotation's key: does it look like one of gpustow's?
    (
        "OURS",
        r#"key.startsWith("{{GROUP}}/") || key.contains(".{{GROUP}}/")"#,
    ),
    (
        "DEBUGS",
        r#"request.?subResource.orValue("") == "ephemeralcontainers""#,
    ),
];
