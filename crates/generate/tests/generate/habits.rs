//! Habits that make a sentence hard to read, counted in every text that users see and in comments. A count may only go down.
//!
//! * `what` for a noun: "what it requests" instead of "its request".
//! * A verb with `no` before its object: "takes no pods" instead of "gets no new pods" or "does not place pods".
//! * Things that `say` or `tell`: they show, name, list or report.
//! * `the same` and `those` without their noun.
//! * `beside` for "with", "next to" or "in addition to".

use std::io;

use crate::prose::{pages, paragraphs, spoken};
use crate::root;
use crate::words::{CRATES, below, literals};

const HABITS: [&str; 6] = ["what", "no X", "say or tell", "the same", "those", "beside"];

/// Which texts, and the most that they have of each habit.
const BOUNDS: [(&str, [usize; 6]); 5] = [
    ("pages", [1, 1, 0, 0, 0, 0]),
    ("manifests, forms, page and pictures", [0, 0, 0, 0, 0, 0]),
    ("help", [0, 0, 0, 0, 0, 0]),
    ("messages", [5, 6, 5, 0, 0, 2]),
    ("comments", [23, 1, 4, 2, 2, 3]),
];

/// A word in small letters, and whether a sentence or a part of it ends there.
fn tokens(text: &str) -> Vec<(String, bool)> {
    let inner = |it: char| it.is_alphanumeric() || it == '\'' || it == '-';
    let parts = text.split_whitespace().filter_map(|part| {
        let word: String = part.chars().skip_while(|it| !inner(*it)).collect();
        let kept: String = word.chars().take_while(|it| inner(*it)).collect();
        let ends = kept.len() < word.len();
        (!kept.is_empty()).then(|| (kept.to_lowercase(), ends))
    });
    parts.collect()
}

/// The habits of a text, each with the words around it.
fn habits(text: &str) -> Vec<(usize, String)> {
    let tokens = tokens(text);
    let verbs = [
        "take", "takes", "has", "have", "add", "adds", "need", "needs",
    ];
    let says = ["say", "says", "said", "tell", "tells", "told"];
    let after_same = ["as", "for", "in", "of", "with", "hold", "holds", "is", "to"];
    let after_those = [
        "that", "of", "who", "which", "with", "whose", "in", "on", "without",
    ];
    let mut found = Vec::new();
    for (at, (word, ends)) in tokens.iter().enumerate() {
        let next = tokens.get(at + 1).map(|(word, _)| word.as_str());
        let before = at.checked_sub(1).map(|at| tokens[at].0.as_str());
        let alone = |after: &[&str]| *ends || next.is_none_or(|it| after.contains(&it));
        let habit = match word.as_str() {
            "what" => Some(0),
            verb if verbs.contains(&verb) && !ends && next == Some("no") => Some(1),
            verb if says.contains(&verb) => Some(2),
            "same" if before == Some("the") && alone(&after_same) => Some(3),
            "those" if alone(&after_those) => Some(4),
            "beside" | "besides" => Some(5),
            _ => None,
        };
        if let Some(habit) = habit {
            let from = at.saturating_sub(4);
            let around = tokens[from..]
                .iter()
                .take(10)
                .map(|(word, _)| word.as_str());
            found.push((habit, around.collect::<Vec<_>>().join(" ")));
        }
    }
    found
}

/// The part of a file that people read: comments and descriptions, help of targets, text between tags; else all of it.
fn said(name: &str, text: &str) -> String {
    let keys = [
        "description: ",
        "summary: ",
        "about: ",
        "label: ",
        "message: ",
    ];
    let is_crd = name.ends_with("crd.yaml");
    let ending = name.rsplit(['.', '/']).next().unwrap_or_default();
    let lines = text.lines().map(str::trim).filter_map(|line| match ending {
        "yaml" | "yml" => {
            let comment = line.split_once("# ").map(|(_, comment)| comment);
            let value = keys.iter().find_map(|key| line.strip_prefix(key));
            value.or(comment).or(is_crd.then_some(line))
        }
        "json" => line.split_once("\"description\": ").map(|(_, text)| text),
        "Makefile" => line.split_once("## ").map(|(_, help)| help),
        _ => Some(line),
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    if !["html", "svg"].contains(&ending) {
        return text;
    }
    let parts = text
        .split('<')
        .filter_map(|it| it.split_once('>'))
        .map(|(_, text)| text);
    parts.collect::<Vec<_>>().join("\n")
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim())
}

/// Every text of a kind, with the file that has it.
fn texts(kind: &str) -> io::Result<Vec<(String, String)>> {
    let root = root();
    let read = |path: &std::path::Path| std::fs::read_to_string(path);
    let named = |path: &std::path::Path| path.display().to_string();
    let mut texts = Vec::new();
    match kind {
        "pages" => {
            for (name, page) in pages()? {
                let all = paragraphs(&page).into_iter();
                texts.extend(all.map(|it| (name.clone(), spoken(&it))));
            }
        }
        "manifests, forms, page and pictures" => {
            let folders = [
                "manifests",
                ".github",
                "docs/images",
                "crates/kubectl-gpustow/src/ui",
            ];
            let endings = [".yaml", ".yml", ".txt", ".json", ".html", ".svg"];
            let mut files = vec![root.join("Makefile")];
            for (folder, ending) in folders.iter().flat_map(|it| endings.map(|end| (it, end))) {
                files.extend(below(&root.join(folder), ending)?);
            }
            // The chart's files are links to the other manifests.
            for path in files
                .into_iter()
                .filter(|it| !named(it).contains("chart/files/"))
            {
                let name = named(&path);
                let text = said(&name, &read(&path)?);
                texts.push((name, spoken(&text)));
            }
        }
        "help" => {
            for path in ["src", "crates/agent/src", "crates/kubectl-gpustow/src"] {
                let path = root.join(path).join("args.rs");
                let text = read(&path)?;
                let product = text.split("#[cfg(test)]").next().unwrap_or_default();
                let lines = product.lines().map(str::trim);
                let lines = lines.filter_map(|line| line.strip_prefix("///"));
                let help = lines.collect::<Vec<_>>().join("\n");
                texts.push((named(&path), help));
            }
        }
        "comments" => {
            for folder in ["src", "crates", "tests", "benches"] {
                for path in below(&root.join(folder), ".rs")? {
                    let text = read(&path)?;
                    let lines: Vec<_> = text.lines().map(comment).collect();
                    let blocks = lines.split(|line| line.is_none_or(str::is_empty));
                    let blocks = blocks.map(|block| block.iter().flatten().copied());
                    let blocks = blocks.map(|block| spoken(&block.collect::<Vec<_>>().join("\n")));
                    texts.extend(blocks.map(|block| (named(&path), block)));
                }
            }
        }
        _ => {
            let crates = CRATES.map(|name| root.join("crates").join(name).join("src"));
            for folder in crates.into_iter().chain([root.join("src")]) {
                for path in below(&folder, ".rs")? {
                    if !path.ends_with("tests.rs") {
                        let all = literals(&read(&path)?).into_iter();
                        texts.extend(all.map(|it| (named(&path), it.replace("\\n", "\n"))));
                    }
                }
            }
        }
    }
    Ok(texts)
}

#[test]
fn habits_do_not_come_back() -> io::Result<()> {
    let mut wrong = Vec::new();
    for (kind, bounds) in BOUNDS {
        let texts = texts(kind)?;
        let mut found: [Vec<String>; 6] = Default::default();
        for (name, text) in &texts {
            for (habit, around) in habits(text) {
                found[habit].push(format!("  {name}: {around}"));
            }
        }
        let counts = found.each_ref().map(Vec::len);
        println!("{kind}: {HABITS:?} {counts:?}");
        for (habit, (found, most)) in found.iter().zip(bounds).enumerate() {
            if found.len() > most {
                let all = found.join("\n");
                wrong.push(format!(
                    "{kind}: {} times {:?}, {most} at most:\n{all}",
                    found.len(),
                    HABITS[habit]
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn habits_are_told_from_plain_sentences() {
    let of = |text: &str| habits(text).into_iter().map(|it| it.0).collect::<Vec<_>>();
    assert_eq!(
        of("what it has, those of others, the same for all"),
        [0, 4, 3]
    );
    assert_eq!(
        of("it takes no pods and says so beside the list"),
        [1, 2, 5]
    );
    assert_eq!(of("those pods on the same GPU have nothing"), [0_usize; 0]);
}
