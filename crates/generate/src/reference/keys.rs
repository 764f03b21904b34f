//! Resources, annotations, labels, conditions and gates, from the only file that spells them.

use anyhow::{Result, ensure};
use gpustow_api::names;

use super::{Table, code, sentence, titled};

const NAMES: &str = include_str!("../../../api/src/names.rs");

/// Who sets a key, as the comments of the names begin.
const GROUPS: [(&str, &str); 5] = [
    ("Set by users", "Set by users: "),
    ("Set by administrators", "Set by administrators: "),
    ("Written by admission", "Written by admission: "),
    ("Written by the extender", "Written by the extender: "),
    ("Written by the agent", "Written by the agent: "),
];

/// The page.
pub(super) fn page() -> Result<String> {
    let intro = "gpustow uses these names on the objects of a cluster. Admission refuses pods with another annotation \
                 of `gpustow.dev`. `<container>` stands for the name of a container.";
    let mut page = titled(
        "Annotations, labels and other names",
        "crates/api/src/names.rs",
        intro,
    );
    let keys = keys();
    for (title, begin) in GROUPS {
        let mut table = Table::new(["name", "meaning"]);
        for (key, comment) in &keys {
            if let Some(what) = comment.strip_prefix(begin) {
                table.row([code(key), sentence(&capital(what))]);
            }
        }
        page += &format!("\n## {title}\n{}", table.0);
    }
    for (key, comment) in &keys {
        let known = GROUPS.iter().any(|(_, begin)| comment.starts_with(begin));
        ensure!(
            known,
            "names.rs does not begin with the setter of {key}: {comment}"
        );
    }
    Ok(page)
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|it| it.to_uppercase().to_string());
    first.unwrap_or_default() + letters.as_str()
}

/// Each constant of the domain with its comment.
fn keys() -> Vec<(String, String)> {
    let domain = format!("{}/", names::GROUP);
    let (mut keys, mut comment) = (Vec::new(), Vec::new());
    for line in NAMES.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            comment.push(text);
            continue;
        }
        let value = line
            .strip_prefix("pub const ")
            .and_then(|it| it.split('"').nth(1));
        if let Some(key) = value.filter(|it| it.contains(&*domain)) {
            let key = match key.ends_with('/') {
                true => format!("{key}<container>"),
                false => key.to_owned(),
            };
            keys.push((key, comment.join(" ")));
        }
        comment.clear();
    }
    keys
}
