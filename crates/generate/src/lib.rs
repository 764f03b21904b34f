//! The generated files: the Grafana dashboard and the [reference](reference::pages) here, the custom resource and the
//! policies in [`gpustow_policies::manifests`].

mod board;
pub mod reference;

use anyhow::Result;
use gpustow_api::gpunode::STALE_AFTER;
use gpustow_policies::manifests::generated;
use serde_json::{Map, Value, json};

use board::{Board, panel, see, source, stat};

/// Every generated file below `manifests` and its text, for pods that ask for `resource`.
///
/// # Errors
/// If `resource` is no name of an extended resource.
pub fn files(resource: &str) -> Result<Vec<(&'static str, String)>> {
    let mut files = generated(resource)?;
    files.push(("dashboards/gpustow.json", format!("{:#}\n", dashboard())));
    Ok(files)
}

const GPU: &str = r#"{cluster=~"$cluster",node=~"$node"} * on (cluster, node, gpu_uuid) group_left (gpu, model) gpustow_gpu_info{model=~"$model"}"#;
const POD: &str = r#"{cluster=~"$cluster",node=~"$node",namespace=~"$namespace"}"#;
const CARD: &str = r#"{cluster=~"$cluster",node=~"$node"}"#;
const MODEL: &str = r#"{cluster=~"$cluster",model=~"$model"}"#;
const CLUSTER: &str = r#"{cluster=~"$cluster"}"#;
const JOB: &str = r#"{cluster=~"$cluster",job=~"$job"}"#;

/// The dashboard in Grafana's classic JSON. Top to bottom: broken? full? wasted?
#[must_use]
pub fn dashboard() -> Value {
    let mut board = Board::default();
    stats(&mut board);
    board.heading("Who waits");
    demand(&mut board);
    board.heading("GPUs");
    cards(&mut board);
    pods_of_cards(&mut board);
    board.heading("Use, waste and teams");
    waste(&mut board);
    board.heading("Right-sizing");
    sizing(&mut board);
    board.heading("Health and the scheduler");
    health(&mut board);
    extender(&mut board);
    json!({
        "uid": "gpustow", "title": "gpustow: GPUs", "tags": ["gpustow", "gpu"], "schemaVersion": 39,
        "version": 1, "editable": false, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
        "time": { "from": "now-6h", "to": "now" },
        "description": "Waiting pods, available memory of each GPU, and idle memory.",
        "links": [], "panels": board.panels,
        "templating": { "list": variables() },
        "annotations": { "list": annotations() },
    })
}

fn stats(board: &mut Board) {
    let memory = |what: &str| {
        format!("sum(max by (cluster, model) (gpustow_cluster_memory_{what}_bytes{MODEL}))")
    };
    let waiting = format!("sum(max by (cluster, reason) (gpustow_pending_pods{CLUSTER}))");
    let oldest = format!("time() - min(gpustow_pending_oldest_timestamp_seconds{CLUSTER})");
    let used = format!(
        "sum(gpustow_gpu_memory_used_bytes{GPU}) / sum(gpustow_gpu_memory_total_bytes{GPU})"
    );
    let allocated = format!("{} / {}", memory("requested"), memory("capacity"));
    let unready = r#"sum(max by (cluster, model, state) (gpustow_gpus{cluster=~"$cluster",model=~"$model|unknown",state!~"ready|cordoned"}))"#;
    let number = |board: &mut Board, stat: Value| board.add((4, 4), stat);
    let text = "Pods refused for want of GPU memory.";
    let stats = stat("Pods waiting", text, "short", &waiting, None);
    number(board, see(stats, &["GpustowPodsWaitFragmented"]));
    let text = "Age of the oldest of them.";
    let stats = stat("Oldest waiting", text, "s", &oldest, Some(3600.0));
    number(board, see(stats, &["GpustowPodsWaitLong"]));
    let text = "GPU memory that new pods may take, on GPUs that take pods.";
    number(
        board,
        stat("Available", text, "bytes", &memory("available"), None),
    );
    let text =
        "Share of the GPU memory that is promised to pods, on all nodes of the chosen models.";
    number(
        board,
        stat("Allocated", text, "percentunit", &allocated, None),
    );
    let text = "Share of the GPU memory that is in use, by any process.";
    number(board, stat("In use", text, "percentunit", &used, None));
    let text =
        "GPUs that are unhealthy, whose agent is silent, or that pods hold and no agent reports.";
    let stats = stat("GPUs not ready", text, "short", unready, Some(1.0));
    number(board, see(stats, &["GpustowGpusUnusable"]));
}

fn demand(board: &mut Board) {
    let mut waiting = panel(
        "timeseries",
        "Waiting pods by reason",
        "too_large: no GPU of that size. no_limit: none whose memory the driver can limit. no_room: all full. fragmented: the room is there, in pieces. group: the room for one pod is there, but not for its gang. policy: the room is there, and the pod's own rules or another pod's claim stand against it.",
        "short",
        &[(
            &format!("sum by (reason) (max by (cluster, reason) (gpustow_pending_pods{CLUSTER}))"),
            "{{reason}}",
        )],
    );
    waiting["fieldConfig"]["defaults"]["custom"] =
        json!({ "stacking": { "mode": "normal" }, "fillOpacity": 40 });
    board.add((12, 8), see(waiting, &["GpustowPodsWaitFragmented"]));
    board.add((12, 8), panel(
        "timeseries",
        "Pods that would still fit, by size",
        "One GPU each. The sizes do not add up: a place for 16Gi is two for 8Gi. whole: empty GPUs.",
        "short",
        &[(&format!("sum by (size) (max by (cluster, model, size) (gpustow_placeable_pods{MODEL}))"), "{{size}}")],
    ));
}

fn cards(board: &mut Board) {
    // Joined by UUID. One query has the other labels: Grafana numbers columns of the same name.
    let requested = format!("gpustow:gpu_memory_requested:bytes{GPU}");
    let by_card = |metric: &str| format!("max by (gpu_uuid) ({metric}{GPU})");
    let used = by_card("gpustow_gpu_memory_used_bytes");
    let room = by_card("gpustow:gpu_memory_available:bytes");
    let healthy = by_card("gpustow_gpu_healthy");
    let pods = format!(
        "count by (gpu_uuid) (count by (gpu_uuid, namespace, pod) (gpustow_pod_gpu_memory_requested_bytes{GPU}))"
    );
    let mut table = panel(
        "table",
        "GPUs",
        "One row per GPU. A node's name leads to its pods below.",
        "bytes",
        &[
            (&requested, ""),
            (&used, ""),
            (&room, ""),
            (&pods, ""),
            (&healthy, ""),
        ],
    );
    table["transformations"] = columns();
    table["fieldConfig"]["overrides"] = cells();
    board.add(
        (24, 12),
        see(table, &["GpustowPodOnWrongGpu", "GpustowGpuOvercommitted"]),
    );
}

/// The columns of the table of GPUs, in their order.
fn columns() -> Value {
    let columns = [
        ("cluster", "Cluster"),
        ("node", "Node"),
        ("gpu", "GPU"),
        ("model", "Model"),
        ("Value #A", "Requested"),
        ("Value #B", "In use"),
        ("Value #C", "Available"),
        ("Value #D", "Pods"),
        ("Value #E", "Health"),
        ("gpu_uuid", "UUID"),
    ];
    let order: Map<_, _> = (0..)
        .zip(columns)
        .map(|(place, (label, _))| (label.to_owned(), json!(place)))
        .collect();
    let names: Map<_, _> = columns
        .map(|(label, name)| (label.to_owned(), json!(name)))
        .into_iter()
        .collect();
    json!([
        { "id": "joinByField", "options": { "byField": "gpu_uuid", "mode": "outer" } },
        { "id": "organize", "options": {
            "excludeByName": { "Time 1": true, "Time 2": true, "Time 3": true, "Time 4": true, "Time 5": true },
            "indexByName": order, "renameByName": names,
        } },
    ])
}

/// How the table of GPUs shows its columns.
fn cells() -> Value {
    let column = |name: &str, properties: &[(&str, Value)]| {
        let properties = properties.iter();
        let properties = properties.map(|(id, value)| json!({ "id": id, "value": value }));
        let properties: Vec<_> = properties.collect();
        json!({ "matcher": { "id": "byName", "options": name }, "properties": properties })
    };
    let sized = |name: &str, unit: &str, width: u64| {
        let (unit, width) = (json!(unit), json!(width));
        column(name, &[("unit", unit), ("custom.width", width)])
    };
    let gauge = |name: &str, colour: &str| {
        let cell = json!({ "type": "gauge", "mode": "basic", "valueDisplayMode": "text" });
        let colour = json!({ "mode": "fixed", "fixedColor": colour });
        column(name, &[("custom.cellOptions", cell), ("color", colour)])
    };
    let link = json!([{ "title": "Its pods",
        "url": "/d/gpustow?var-node=${__value.text}&${datasource:queryparam}&${cluster:queryparam}" }]);
    let states = json!([{ "type": "value", "options": {
        "0": { "text": "takes no pods", "color": "red" }, "1": { "text": "healthy", "color": "green" } } }]);
    json!([
        gauge("Requested", "blue"),
        gauge("In use", "green"),
        gauge("Available", "text"),
        column("Node", &[("links", link)]),
        // Names, not bytes.
        sized("GPU", "string", 60),
        column("Model", &[("custom.width", json!(240))]),
        sized("Pods", "short", 70),
        column(
            "Health",
            &[
                ("unit", json!("short")),
                ("mappings", states),
                ("custom.cellOptions", json!({ "type": "color-text" })),
                ("custom.width", json!(130)),
            ]
        ),
    ])
}

fn pods_of_cards(board: &mut Board) {
    for (title, description, metric) in [
        (
            "Pods on each GPU, by request",
            "A bar per GPU of the chosen nodes, a segment per pod.",
            "requested",
        ),
        (
            "Pods on each GPU, in use",
            "Memory in use, as NVML shows it.",
            "used",
        ),
    ] {
        let expr = format!(
            r#"sum by (card, owner) (label_join(label_join(gpustow_pod_gpu_memory_{metric}_bytes{POD} * on (cluster, node, gpu_uuid) group_left (gpu) gpustow_gpu_info, "card", " ", "node", "gpu"), "owner", "/", "namespace", "pod"))"#
        );
        let mut bars = panel("barchart", title, description, "bytes", &[(&expr, "")]);
        bars["targets"][0]["format"] = json!("table");
        bars["transformations"] = json!([{ "id": "groupingToMatrix", "options": {
            "columnField": "owner", "rowField": "card", "valueField": "Value", "emptyValue": "null" } }]);
        bars["options"] = json!({ "orientation": "horizontal", "stacking": "normal", "xField": "card\\owner",
            "legend": { "displayMode": "list", "placement": "bottom" } });
        board.add((12, 10), bars);
    }
}

fn waste(board: &mut Board) {
    let requested = format!("sum(gpustow_pod_gpu_memory_requested_bytes{POD})");
    let used = format!("sum(gpustow_pod_gpu_memory_used_bytes{POD})");
    let unmanaged = format!("sum(gpustow_gpu_memory_unmanaged_bytes{CARD})");
    let use_of = panel(
        "timeseries",
        "Requested, in use, others",
        "Unmanaged: memory of processes that are no gpustow pod's.",
        "bytes",
        &[
            (&requested, "requested"),
            (&used, "in use"),
            (&unmanaged, "unmanaged"),
        ],
    );
    let alerts = ["GpustowUnmanagedMemory", "GpustowPodOverRequest"];
    board.add((12, 8), see(use_of, &alerts));
    let idle = format!(
        "topk(10, sum by (namespace, pod) (gpustow_pod_gpu_memory_requested_bytes{POD}) - sum by (namespace, pod) (gpustow_pod_gpu_memory_used_bytes{POD}))"
    );
    let idle = panel(
        "timeseries",
        "Most idle pods",
        "Requested and not in use.",
        "bytes",
        &[(&idle, "{{namespace}}/{{pod}}")],
    );
    board.add((12, 8), see(idle, &["GpustowMemoryIdle"]));
    let teams = format!(
        "sort_desc(sum by (namespace) (sum_over_time(gpustow:namespace_gpu_memory_requested:bytes{POD}[$__range:1m])) / 60 / 2^30)"
    );
    let mut teams = panel(
        "table",
        "GiB-hours by namespace",
        "Held over the chosen time, minute by minute: a pod counts for as long as it was there.",
        "short",
        &[(&teams, "")],
    );
    teams["transformations"] = json!([{ "id": "organize", "options": {
        "excludeByName": { "Time": true }, "renameByName": { "namespace": "Namespace", "Value": "GiB-hours" } } }]);
    board.add((12, 8), teams);
    let mut room = panel(
        "heatmap",
        "Available memory per GPU",
        "How many GPUs have how much room: many with little is fragmentation.",
        "bytes",
        &[(&format!("gpustow:gpu_memory_available:bytes{GPU}"), "")],
    );
    room["options"] = json!({ "calculate": true, "yAxis": { "unit": "bytes" } });
    board.add((12, 8), room);
}

fn sizing(board: &mut Board) {
    let of = |what: &str| {
        format!(
            r#"max by (cluster, namespace, kind, workload, container) (gpustow_workload_{what}_bytes{{cluster=~"$cluster",namespace=~"$namespace"}})"#
        )
    };
    let beyond = format!("topk(10, {} - {})", of("requested"), of("advised"));
    board.add((12, 8), panel(
        "timeseries",
        "Requests beyond the advice",
        "MiB of each GPU that a container requests and uses in short peaks alone, if ever. `kubectl gpustow advise` has patches.",
        "bytes",
        &[(&beyond, "{{namespace}}/{{workload}} {{container}}")],
    ));
    let sum = |what: &str| format!("sum({})", of(what));
    board.add((12, 8), panel(
        "timeseries",
        "Requested and advised",
        "Sums over the containers of workloads, each counted once, of the workloads that request most beyond the advice.",
        "bytes",
        &[(&sum("requested"), "requested"), (&sum("advised"), "advised")],
    ));
}

fn health(board: &mut Board) {
    // 0 or 1 for health, 2 more after an XID, 4 more while the agent is silent.
    let state = format!(
        "gpustow_gpu_healthy{GPU} + on (cluster, node, gpu_uuid) group_left () \
         (2 * (sum by (cluster, node, gpu_uuid) (increase(gpustow_gpu_xid_errors_total{CARD}[5m])) > bool 0) \
         or 0 * max by (cluster, node, gpu_uuid) (gpustow_gpu_healthy{CARD})) \
         + on (cluster, node) group_left () 4 * max by (cluster, node) \
         (gpustow_gpu_healthy{CARD} * 0 + on (cluster, instance) group_left () \
         (time() - gpustow_agent_last_publish_timestamp_seconds{CLUSTER} > bool {}))",
        STALE_AFTER.as_secs()
    );
    let mut timeline = panel(
        "state-timeline",
        "Health of GPUs",
        "Silent: the agent runs and has not reported for three minutes. A gap: the agent is gone.",
        "short",
        &[(&state, "{{node}} {{gpu}}")],
    );
    let known = |value: u8, text: &str, colour: &str| {
        let result = json!({ "text": text, "color": colour });
        json!({ "type": "range", "options": { "from": value, "to": value, "result": result } })
    };
    timeline["fieldConfig"]["defaults"]["mappings"] = json!([
        known(0, "takes no pods", "red"), known(1, "healthy", "green"), known(2, "XID, takes no pods", "dark-red"),
        known(3, "XID", "orange"),
        { "type": "range", "options": { "from": 4, "to": 7, "result": { "text": "silent", "color": "purple" } } },
    ]);
    board.add((24, 8), see(timeline, &["GpustowGpusUnusable"]));
}

fn extender(board: &mut Board) {
    let quantile = |q: &str| {
        format!(
            "histogram_quantile({q}, sum by (le, verb) (rate(gpustow_extender_request_duration_seconds_bucket{JOB}[$__rate_interval])))"
        )
    };
    let latency = panel(
        "timeseries",
        "Time to answer kube-scheduler",
        "Server side, by verb.",
        "s",
        &[
            (&quantile("0.5"), "{{verb}} p50"),
            (&quantile("0.99"), "{{verb}} p99"),
        ],
    );
    board.add((12, 8), see(latency, &["GpustowExtenderSlow"]));
    const COUNT: &str = "extender_request_duration_seconds_count";
    let rate = |by: &str, series: &str| {
        format!("sum by ({by}) (rate(gpustow_{series}{JOB}[$__rate_interval]))")
    };
    let calls = panel(
        "timeseries",
        "Calls, refusals and failures",
        "Calls by verb, filter calls that placed nothing by reason, calls that were not served, binds that failed.",
        "ops",
        &[
            (&rate("verb", COUNT), "{{verb}}"),
            (
                &rate("reason", "extender_refusals_total"),
                "refused: {{reason}}",
            ),
            (
                &rate("verb, error", "extender_request_errors_total"),
                "error: {{verb}}, {{error}}",
            ),
            (
                &rate("reason", "bind_failures_total"),
                "bind failed: {{reason}}",
            ),
        ],
    );
    let alerts = [
        "GpustowExtenderErrors",
        "GpustowBindsFail",
        "GpustowExtenderDown",
    ];
    board.add((12, 8), see(calls, &alerts));
}

fn variables() -> Vec<Value> {
    let query = |name: &str, label: &str, query: &str| {
        json!({
            "name": name, "label": label, "type": "query", "datasource": source(), "query": query,
            "refresh": 2, "sort": 1, "multi": true, "includeAll": true, "allValue": ".*",
            "current": { "text": "All", "value": "$__all" },
        })
    };
    vec![
        json!({ "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus" }),
        query(
            "cluster",
            "Cluster",
            "label_values(gpustow_build_info, cluster)",
        ),
        query(
            "model",
            "Model",
            &format!("label_values(gpustow_gpu_info{CLUSTER}, model)"),
        ),
        query(
            "node",
            "Node",
            &format!("label_values(gpustow_gpu_info{MODEL}, node)"),
        ),
        query(
            "namespace",
            "Namespace",
            &format!("label_values(gpustow_pod_gpu_memory_requested_bytes{CLUSTER}, namespace)"),
        ),
        query(
            "job",
            "Job",
            &format!("label_values(gpustow_build_info{CLUSTER}, job)"),
        ),
    ]
}

fn annotations() -> Vec<Value> {
    let note = |name: &str, colour: &str, expr: &str, text: &str| {
        json!({
            "name": name, "datasource": source(), "enable": true, "iconColor": colour, "expr": expr,
            "titleFormat": name, "textFormat": text, "step": "60s",
        })
    };
    vec![
        note(
            "XID",
            "red",
            &format!("increase(gpustow_gpu_xid_errors_total{CARD}[1m]) > 0"),
            "{{node}} {{gpu_uuid}} XID {{xid}}",
        ),
        note(
            "Restart",
            "blue",
            r#"changes(process_start_time_seconds{cluster=~"$cluster",job=~"gpustow-.*"}[5m]) > 0"#,
            "{{job}} {{instance}}",
        ),
        note(
            "Alert",
            "orange",
            r#"ALERTS{cluster=~"$cluster",alertname=~"Gpustow.*",alertstate="firing"}"#,
            "{{alertname}}",
        ),
    ]
}
