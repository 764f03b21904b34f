//! Writes the Grafana dashboard: `cargo run --example dashboard > manifests/dashboards/gpustow.json`.

use serde_json::{Value, json};

// A test includes this file as a module and leaves this function aside.
#[allow(dead_code)]
fn main() {
    println!("{:#}", dashboard());
}

const GPU: &str = r#"{node=~"$node"} * on (node, gpu_uuid) group_left (gpu, model) gpustow_gpu_info{model=~"$model"}"#;
const POD: &str = r#"{node=~"$node",namespace=~"$namespace"}"#;
const CARD: &str = r#"{node=~"$node"}"#;
const MODEL: &str = r#"{model=~"$model"}"#;

/// The dashboard in Grafana's classic JSON. Top to bottom: broken? full? wasted?
pub(crate) fn dashboard() -> Value {
    let mut board = Board::default();
    stats(&mut board);
    demand(&mut board);
    cards(&mut board);
    waste(&mut board);
    health(&mut board);
    json!({
        "uid": "gpustow", "title": "gpustow: GPUs", "tags": ["gpustow", "gpu"], "schemaVersion": 39,
        "version": 1, "editable": false, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
        "time": { "from": "now-6h", "to": "now" },
        "description": "Who waits for GPU memory, what is left on which GPU, and what is idle.",
        "links": [], "panels": board.panels,
        "templating": { "list": variables() },
        "annotations": { "list": annotations() },
    })
}

#[derive(Default)]
struct Board {
    panels: Vec<Value>,
    x: u64,
    y: u64,
    row: u64,
}

impl Board {
    /// Adds a panel of this size; 24 columns are a row.
    fn add(&mut self, (width, height): (u64, u64), mut panel: Value) {
        if self.x + width > 24 {
            self.x = 0;
            self.y += self.row;
            self.row = 0;
        }
        panel["id"] = json!(self.panels.len() + 1);
        panel["datasource"] = source();
        panel["gridPos"] = json!({ "x": self.x, "y": self.y, "w": width, "h": height });
        self.x += width;
        self.row = self.row.max(height);
        self.panels.push(panel);
    }
}

fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

/// A panel; `queries` are expressions with their legends.
fn panel(
    kind: &str,
    title: &str,
    description: &str,
    unit: &str,
    queries: &[(&str, &str)],
) -> Value {
    let instant = matches!(kind, "stat" | "table" | "barchart");
    let targets = queries.iter().zip('A'..).map(|((expr, legend), id)| {
        json!({
            "refId": id.to_string(), "datasource": source(), "expr": expr, "legendFormat": legend,
            "instant": instant, "range": !instant,
            "format": if kind == "table" { "table" } else { "time_series" },
        })
    });
    json!({
        "type": kind, "title": title, "description": description,
        "targets": targets.collect::<Vec<_>>(),
        "fieldConfig": { "defaults": { "unit": unit, "min": 0, "custom": {} }, "overrides": [] },
        "options": {}, "transformations": [],
    })
}

fn stats(board: &mut Board) {
    let memory =
        |what: &str| format!("sum(max by (model) (gpustow_cluster_memory_{what}_bytes{MODEL}))");
    let used = format!(
        "sum(gpustow_gpu_memory_used_bytes{GPU}) / sum(gpustow_gpu_memory_total_bytes{GPU})"
    );
    let allocated = format!("{} / {}", memory("requested"), memory("capacity"));
    let unready =
        r#"sum(max by (model, state) (gpustow_gpus{model=~"$model",state!="ready"})) or vector(0)"#;
    for (title, description, unit, expr, alarm) in [
        (
            "Pods waiting",
            "Pods refused for want of GPU memory.",
            "short",
            "sum(max by (reason) (gpustow_pending_pods))",
            Some(1.0),
        ),
        (
            "They ask for",
            "GPU memory that the waiting pods ask for.",
            "bytes",
            "sum(max by (reason) (gpustow_pending_memory_bytes))",
            None,
        ),
        (
            "Room",
            "GPU memory that new pods may take, on GPUs that take pods.",
            "bytes",
            &memory("room"),
            None,
        ),
        (
            "Allocated",
            "Share of the GPU memory that is promised to pods.",
            "percentunit",
            &allocated,
            None,
        ),
        (
            "In use",
            "Share of the GPU memory that is in use, by whomever.",
            "percentunit",
            &used,
            None,
        ),
        (
            "GPUs not ready",
            "GPUs that are unhealthy or whose agent is silent.",
            "short",
            unready,
            Some(1.0),
        ),
    ] {
        let mut stat = panel("stat", title, description, unit, &[(expr, "")]);
        let mut steps = vec![json!({ "color": "green", "value": null })];
        steps.extend(alarm.map(|value| json!({ "color": "red", "value": value })));
        stat["fieldConfig"]["defaults"]["thresholds"] =
            json!({ "mode": "absolute", "steps": steps });
        board.add((4, 4), stat);
    }
}

fn demand(board: &mut Board) {
    let mut waiting = panel(
        "timeseries",
        "Waiting pods by reason",
        "too_large: no GPU of that size. no_room: all full. fragmented: the room is there, in pieces.",
        "short",
        &[("max by (reason) (gpustow_pending_pods)", "{{reason}}")],
    );
    waiting["fieldConfig"]["defaults"]["custom"] =
        json!({ "stacking": { "mode": "normal" }, "fillOpacity": 40 });
    board.add((12, 8), waiting);
    board.add((12, 8), panel(
        "timeseries",
        "Pods that would still fit, by size",
        "One GPU each. The sizes do not add up: a place for 16Gi is two for 8Gi. whole: empty GPUs.",
        "short",
        &[(r#"sum by (size) (max by (model, size) (gpustow_placeable_pods{model=~"$model"}))"#, "{{size}}")],
    ));
}

fn cards(board: &mut Board) {
    let requested = format!("gpustow:gpu_memory_requested:bytes{GPU}");
    let used = format!("gpustow_gpu_memory_used_bytes{GPU}");
    let room = format!("gpustow:gpu_memory_room:bytes{GPU}");
    let pods = format!(
        "count by (node, gpu_uuid) (count by (node, gpu_uuid, namespace, pod) (gpustow_pod_gpu_memory_requested_bytes{CARD}))"
    );
    let healthy = format!("gpustow_gpu_healthy{GPU}");
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
    table["transformations"] = json!([
        { "id": "joinByField", "options": { "byField": "gpu_uuid", "mode": "outer" } },
        { "id": "organize", "options": {
            "excludeByName": { "Time": true, "Time 1": true, "Time 2": true, "Time 3": true, "Time 4": true, "Time 5": true,
                "node 2": true, "node 3": true, "node 4": true, "node 5": true, "gpu 2": true, "gpu 3": true, "gpu 5": true,
                "model 2": true, "model 3": true, "model 5": true },
            "renameByName": { "node 1": "Node", "gpu 1": "GPU", "model 1": "Model", "gpu_uuid": "UUID", "Value #A": "Requested",
                "Value #B": "In use", "Value #C": "Room", "Value #D": "Pods", "Value #E": "Health" },
        } },
    ]);
    let gauge = |name: &str, colour: &str| {
        json!({ "matcher": { "id": "byName", "options": name }, "properties": [
        { "id": "custom.cellOptions", "value": { "type": "gauge", "mode": "basic", "valueDisplayMode": "text" } },
        { "id": "color", "value": { "mode": "fixed", "fixedColor": colour } },
    ] })
    };
    table["fieldConfig"]["overrides"] = json!([
        gauge("Requested", "blue"), gauge("In use", "green"), gauge("Room", "text"),
        { "matcher": { "id": "byName", "options": "Pods" }, "properties": [{ "id": "unit", "value": "short" }] },
        { "matcher": { "id": "byName", "options": "Health" }, "properties": [
            { "id": "unit", "value": "short" },
            { "id": "mappings", "value": [{ "type": "value", "options": {
                "0": { "text": "takes no pods", "color": "red" }, "1": { "text": "healthy", "color": "green" } } }] },
        ] },
        { "matcher": { "id": "byName", "options": "Node" }, "properties": [{ "id": "links", "value": [
            { "title": "Its pods", "url": "/d/gpustow?var-node=${__value.text}&${datasource:queryparam}" } ] }] },
    ]);
    board.add((24, 12), table);
    for (title, description, metric) in [
        (
            "Pods on each GPU, by request",
            "A bar per GPU of the chosen nodes, a segment per pod.",
            "requested",
        ),
        (
            "Pods on each GPU, in use",
            "The same by what NVML shows.",
            "used",
        ),
    ] {
        let expr = format!("sum by (gpu_uuid, pod) (gpustow_pod_gpu_memory_{metric}_bytes{POD})");
        let mut bars = panel("barchart", title, description, "bytes", &[(&expr, "")]);
        bars["targets"][0]["format"] = json!("table");
        bars["transformations"] = json!([{ "id": "groupingToMatrix", "options": {
            "columnField": "pod", "rowField": "gpu_uuid", "valueField": "Value" } }]);
        bars["options"] = json!({ "orientation": "horizontal", "stacking": "normal", "xField": "gpu_uuid\\pod",
            "legend": { "displayMode": "list", "placement": "bottom" } });
        board.add((12, 10), bars);
    }
}

fn waste(board: &mut Board) {
    let requested = format!("sum(gpustow_pod_gpu_memory_requested_bytes{POD})");
    let used = format!("sum(gpustow_pod_gpu_memory_used_bytes{POD})");
    let strangers = format!("sum(gpustow_gpu_memory_unattributed_bytes{CARD})");
    board.add(
        (12, 8),
        panel(
            "timeseries",
            "Requested, in use, others",
            "Others: memory of processes that are no gpustow pod's.",
            "bytes",
            &[
                (&requested, "requested"),
                (&used, "in use"),
                (&strangers, "others"),
            ],
        ),
    );
    let idle = format!(
        "topk(10, sum by (namespace, pod) (gpustow_pod_gpu_memory_requested_bytes{POD}) - sum by (namespace, pod) (gpustow_pod_gpu_memory_used_bytes{POD}))"
    );
    board.add(
        (12, 8),
        panel(
            "timeseries",
            "Most idle pods",
            "Requested and not in use.",
            "bytes",
            &[(&idle, "{{namespace}}/{{pod}}")],
        ),
    );
    let teams = format!(
        "sum by (namespace) (avg_over_time(gpustow_pod_gpu_memory_requested_bytes{POD}[$__range])) * $__range_s / 3600 / 2^30"
    );
    board.add(
        (12, 8),
        panel(
            "table",
            "GiB-hours by namespace",
            "Held over the chosen time.",
            "short",
            &[(&teams, "")],
        ),
    );
    let mut room = panel(
        "heatmap",
        "Room per GPU",
        "How many GPUs have how much room: many with little is fragmentation.",
        "bytes",
        &[(&format!("gpustow:gpu_memory_room:bytes{GPU}"), "")],
    );
    room["options"] = json!({ "calculate": true, "yAxis": { "unit": "bytes" } });
    board.add((12, 8), room);
}

fn health(board: &mut Board) {
    let healthy = format!("gpustow_gpu_healthy{GPU}");
    let mut timeline = panel(
        "state-timeline",
        "Health of GPUs",
        "A gap: the agent is silent.",
        "short",
        &[(&healthy, "{{node}} {{gpu}}")],
    );
    timeline["fieldConfig"]["defaults"]["mappings"] = json!([{ "type": "value", "options": {
        "0": { "text": "takes no pods", "color": "red" }, "1": { "text": "healthy", "color": "green" } } }]);
    board.add((24, 8), timeline);
    let quantile = |q: &str| {
        format!(
            "histogram_quantile({q}, sum by (le, verb) (rate(gpustow_extender_request_duration_seconds_bucket{{job=~\"$job\"}}[$__rate_interval])))"
        )
    };
    board.add(
        (12, 8),
        panel(
            "timeseries",
            "Time to answer kube-scheduler",
            "Server side, by verb.",
            "s",
            &[
                (&quantile("0.5"), "{{verb}} p50"),
                (&quantile("0.99"), "{{verb}} p99"),
            ],
        ),
    );
    board.add((12, 8), panel("timeseries", "Refusals and failures", "Filter calls that placed nothing by reason, calls answered with an error, binds that failed.", "ops", &[
        (r#"sum by (reason) (rate(gpustow_extender_refusals_total{job=~"$job"}[$__rate_interval]))"#, "refused: {{reason}}"),
        (r#"sum by (verb) (rate(gpustow_extender_request_duration_seconds_count{job=~"$job",result="error"}[$__rate_interval]))"#, "error: {{verb}}"),
        (r#"sum(rate(gpustow_bind_failures_total{job=~"$job"}[$__rate_interval])) or vector(0)"#, "bind failed"),
    ]));
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
        query("model", "Model", "label_values(gpustow_gpu_info, model)"),
        query(
            "node",
            "Node",
            "label_values(gpustow_gpu_info{model=~\"$model\"}, node)",
        ),
        query(
            "namespace",
            "Namespace",
            "label_values(gpustow_pod_gpu_memory_requested_bytes, namespace)",
        ),
        query("job", "Job", "label_values(gpustow_build_info, job)"),
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
            "increase(gpustow_gpu_xid_errors_total[1m]) > 0",
            "{{node}} {{gpu_uuid}} XID {{xid}}",
        ),
        note(
            "Restart",
            "blue",
            "resets(gpustow_extender_request_duration_seconds_count{verb=\"filter\",result=\"ok\"}[5m]) > 0",
            "{{instance}}",
        ),
        note(
            "Alert",
            "orange",
            r#"ALERTS{alertname=~"Gpustow.*",alertstate="firing"}"#,
            "{{alertname}}",
        ),
    ]
}
