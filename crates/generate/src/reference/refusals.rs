//! Why nodes are refused, from the reasons of the ledger.

use gpustow_ledger::Reason;

use super::{Table, titled};

/// The page.
pub(super) fn page() -> String {
    let intro = "kube-scheduler counts the nodes that cannot take a pod by reason, in the Event `FailedScheduling` and in the condition \
                 `PodScheduled`. These are gpustow's reasons. The value is that of the label `reason` of \
                 `gpustow_extender_refusals_total`. [Troubleshooting](../troubleshooting.md) says where to start.";
    let mut table = Table::new(["reason", "value", "what it means", "what to do", "more"]);
    for reason in Reason::all() {
        let (means, advice, page) = reason.explanation();
        let name = page.split(".md").next().unwrap_or(page);
        let name = name.rsplit('/').next().unwrap_or(name);
        table.row([
            reason.text().to_owned(),
            format!("`{}`", reason.label()),
            means.to_owned(),
            advice.to_owned(),
            format!("[{name}](../{page})"),
        ]);
    }
    titled("Refusals", "crates/books/src/reason.rs", intro) + &table.0
}
