//! CEL that policies and the webhook's conditions share.

/// The first may name those after it.
pub(crate) const SHARED: [(&str, &str); 22] = [
    // The containers that a request brings, with the paths that patches and messages name.
    ("CONTAINERS_PATHS", include_str!("../policies/paths.cel")),
    ("CONTAINERS_FIELDS", include_str!("../policies/fields.cel")),
    // Does the pod carry a key of gpustow's? More annotations than most pods have are looked up by name alone.
    (
        "HAS_OURS",
        r#"({{ASKS}} || {{GATED}} ||
          [object.metadata.?annotations.orValue({})].exists(all, size(all) > {{MAX_COMPARED}} ?
            {{WRITTEN}}.exists(key, key in all) : all.exists(key, {{OURS}})) ||
          [object.metadata.?labels.orValue({})].exists(all, size(all) <= {{MAX_COMPARED}} && all.exists(key, {{OURS}})) ||
          {{FEW}} && {{ALL}}.exists(c, c.?resources.?limits.orValue({}).exists(key, {{OURS}})))"#,
    ),
    // Does it carry one of the sharers whose requests are translated?
    (
        "HAS_FOREIGN",
        r#"({{FEW}} && {{ALL}}.exists(c, c.?resources.?limits.orValue({}).exists(key, {{FOREIGN}})) ||
          [object.metadata.?annotations.orValue({}), object.metadata.?labels.orValue({})].exists(all,
            size(all) <= {{MAX_COMPARED}} && all.exists(key, key.startsWith("aliyun.com/gpu") || key.startsWith("hami.io/"))))"#,
    ),
    (
        "FOREIGN",
        r#"["aliyun.com/", "nvidia.com/", "volcano.sh/"].exists(it, key.startsWith(it))"#,
    ),
    // What only gpustow writes of a pod.
    (
        "WRITTEN",
        r#"["{{ASSIGNMENT}}", "{{EPOCH}}", "{{FENCE}}", "{{RESERVATION}}", "{{CONFIRMED}}", "{{PLACEHOLDER_FOR}}"]"#,
    ),
    // Its own accounts, which other policies hold to their own keys.
    (
        "BY_GPUSTOW",
        r#"request.userInfo.username in {{EXTENDERS}} + ["system:serviceaccount:{{NAMESPACE}}:{{AGENT}}"]"#,
    ),
    // Where agents set limits, those of a pod that runs follow its annotations, for whoever has the right.
    (
        "MAY_RESIZE",
        r#"authorizer.group("{{GROUP}}").resource("limits").namespace(object.metadata.namespace).check("resize").allowed()"#,
    ),
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
    ("ASKS", "{{ALL}}.exists(c, {{WANTS}})"),
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
    // NVIDIA's GPUs among the limits of container c, as names::is_nvidia_gpu has them.
    (
        "NVIDIA",
        r#"c.is.?resources.?limits.orValue({}).exists(name, c.is.resources.limits[name] != "0" &&
          name.matches("^nvidia[.]com/(v?gpu|gpu[.]shared|gpumem(-percentage)?|gpucores|mig-.*)$"))"#,
    ),
    (
        "ADDED",
        "!(oldObject != null && oldObject.spec.?ephemeralContainers.orValue([]).exists(old, old.name == c.name))",
    ),
    // Of a key: does it look like one of gpustow's?
    (
        "OURS",
        r#"(key.startsWith("{{GROUP}}/") || key.contains(".{{GROUP}}/"))"#,
    ),
    (
        "DEBUGS",
        r#"request.?subResource.orValue("") == "ephemeralcontainers""#,
    ),
];
