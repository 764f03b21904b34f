//! The common parts of the dashboard's panels, and the position of each panel.

use serde_json::{Value, json};

const RUNBOOKS: &str = "https://github.com/gpustow/gpustow/blob/main/docs/runbooks";

#[derive(Default)]
pub(super) struct Board {
    pub(super) panels: Vec<Value>,
    x: u64,
    y: u64,
    row: u64,
}

impl Board {
    /// Begins a row under a heading, which Grafana can fold.
    pub(super) fn heading(&mut self, title: &str) {
        self.y += self.row;
        let place = json!({ "x": 0, "y": self.y, "w": 24, "h": 1 });
        (self.x, self.y, self.row) = (0, self.y + 1, 0);
        let id = self.panels.len() + 1;
        self.panels.push(json!({ "id": id, "type": "row", "title": title, "collapsed": false, "gridPos": place, "panels": [] }));
    }

    /// Adds a panel of this size; 24 columns are a row.
    pub(super) fn add(&mut self, (width, height): (u64, u64), mut panel: Value) {
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

pub(super) fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

/// A panel; `queries` are expressions with their legends.
pub(super) fn panel(
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

/// Adds links to the runbooks of these alerts.
pub(super) fn see(mut panel: Value, alerts: &[&str]) -> Value {
    let link = |alert: &&str| json!({ "title": alert, "url": format!("{RUNBOOKS}/{alert}.md"), "targetBlank": true });
    panel["links"] = alerts.iter().map(link).collect();
    panel
}

/// The number at the top, red from `alarm` on.
pub(super) fn stat(
    title: &str,
    description: &str,
    unit: &str,
    expr: &str,
    alarm: Option<f64>,
) -> Value {
    let mut stat = panel("stat", title, description, unit, &[(expr, "")]);
    let mut steps = vec![json!({ "color": "green", "value": null })];
    steps.extend(alarm.map(|value| json!({ "color": "red", "value": value })));
    let defaults = &mut stat["fieldConfig"]["defaults"];
    defaults["thresholds"] = json!({ "mode": "absolute", "steps": steps });
    defaults["noValue"] = json!("none");
    stat
}
