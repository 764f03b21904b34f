//! The Events of gpustow.

use gpustow_api::events;

use super::{Table, titled};

/// The objects that have Events, and where people see them.
const OBJECTS: [(&str, &str); 3] = [
    ("Pod", "kubectl describe pod POD"),
    ("Node", "kubectl describe node NODE"),
    ("GpustowConfig", "kubectl describe gpustowconfig gpustow"),
];

/// The page.
pub(super) fn page() -> String {
    let intro = "These are the Events that gpustow writes. Search this page for the text that you see. \
                 [Events](../events.md) has those of kube-scheduler, and [disruptions](../disruptions.md) says which follow from a \
                 field of the GpustowConfig.";
    let mut page = titled("Events of gpustow", "crates/api/src/events.rs", intro);
    for (object, shown) in OBJECTS {
        let mut table = Table::new(["Event", "it reads", "what it means", "what to do"]);
        for known in events::ALL.iter().filter(|it| it.about == object) {
            let from_here = |text: &str| {
                text.replace("](", "](../")
                    .replace("](../https:", "](https:")
            };
            let cells = [known.reads, known.means, known.advice].map(from_here);
            let [reads, means, advice] = cells;
            table.row([format!("`{}`", known.reason), reads, means, advice]);
        }
        page += &format!("\n## Of a {object}\n\n`{shown}` shows them.\n{}", table.0);
    }
    page
}
