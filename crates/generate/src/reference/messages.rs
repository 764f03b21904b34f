//! The messages that users see: errors and reasons that kube-scheduler quotes, the Events of gpustow, and GPU errors.

use gpustow_api::events;
use gpustow_ledger::Reason;

use super::{Table, titled};

/// The page, with marks for the two parts that are generated. No definition of the programs has the rest.
const TEMPLATE: &str = include_str!("messages.txt");

/// The objects that have Events, and where people see them.
const OBJECTS: [(&str, &str, &str); 3] = [
    ("Pod", "pods", "pod POD"),
    ("Node", "nodes", "node NODE"),
    (
        "GpustowConfig",
        "the GpustowConfig",
        "gpustowconfig gpustow",
    ),
];

/// The page.
pub(super) fn page() -> String {
    let text = TEMPLATE.trim_end().replace("{refusals}", &refusals());
    let text = text.replace("{events}", &written());
    let from = "the programs' definitions and crates/generate/src/reference/messages.txt";
    titled("Messages", from, &text)
}

/// Why nodes are refused.
fn refusals() -> String {
    let mut table = Table::new(["reason", "value", "meaning", "action", "page"]);
    for reason in Reason::all() {
        let (means, advice, page) = (reason.meaning(), reason.advice(), reason.page());
        let name = page.split(['.', '#']).next().unwrap_or(page);
        let [value, link] = [format!("`{}`", reason.label()), format!("[{name}]({page})")];
        let [text, means, advice, link] = [reason.text(), means, advice, &link].map(from_here);
        table.row([text, value, means, advice, link]);
    }
    table.0
}

/// The Events.
fn written() -> String {
    let parts = OBJECTS.map(|(object, of, shown)| {
        let mut table = Table::new(["Event", "text", "meaning", "action"]);
        for known in events::ALL.iter().filter(|it| it.about == object) {
            let [reads, means, advice] = [known.reads, known.means, known.advice].map(from_here);
            table.row([format!("`{}`", known.reason), reads, means, advice]);
        }
        format!(
            "\n## Events of {of}\n\n`kubectl describe {shown}` shows them.\n{}",
            table.0
        )
    });
    parts.concat()
}

/// Links of definitions are relative to docs.
fn from_here(text: &str) -> String {
    text.replace("](", "](../")
        .replace("](../https:", "](https:")
        .replace("](../reference/", "](")
}
