//! The order of the book: ten tasks that lead to their pages, titles that differ, and a table of the runbooks.

use std::collections::{BTreeMap, BTreeSet};
use std::{fs, io};

use crate::root;

/// The tasks of readers. Each has at most three pages, in docs/tasks.md.
const TASKS: [&str; 10] = [
    "Install gpustow",
    "Run a first pod",
    "My pod waits",
    "Migrate from time-slicing",
    "Migrate from HAMi",
    "Limit a pod",
    "Give a team a quota",
    "An alert fires",
    "Upgrade",
    "Uninstall",
];

fn page(name: &str) -> io::Result<String> {
    fs::read_to_string(root().join("docs").join(name))
}

/// Texts and targets of links.
fn links(text: &str) -> Vec<(String, String)> {
    let parts = text.split('[').skip(1);
    let links = parts.filter_map(|it| {
        let (shown, rest) = it.split_once("](")?;
        let (target, _) = rest.split_once(')')?;
        Some((shown.to_owned(), target.to_owned()))
    });
    links.collect()
}

/// Rows of a page's tables as their cells, without heads.
fn rows(page: &str) -> Vec<Vec<String>> {
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let cells = rows.map(|row| row.trim_matches('|').split(" | ").map(str::trim));
    cells
        .map(|cells| cells.map(str::to_owned).collect())
        .collect()
}

#[test]
fn each_of_ten_tasks_has_at_most_three_pages() -> io::Result<()> {
    let summary = page("SUMMARY.md")?;
    let first = links(&summary).into_iter().next();
    let first = first.map(|(_, target)| target);
    assert_eq!(first.as_deref(), Some("tasks.md"), "the book begins there");
    let titles: BTreeMap<_, _> = links(&summary)
        .into_iter()
        .map(|(title, target)| (target, title))
        .collect();
    let tasks = rows(&page("tasks.md")?).split_off(1);
    let named: Vec<_> = tasks.iter().map(|cells| cells[0].as_str()).collect();
    assert_eq!(named, TASKS);
    for cells in &tasks {
        let pages = links(&cells[1]);
        assert!((1..=3).contains(&pages.len()), "{}: {pages:?}", cells[0]);
        for (shown, target) in pages {
            let title = titles.get(&target);
            assert_eq!(title, Some(&shown), "{}: {target}", cells[0]);
        }
    }
    Ok(())
}

/// The words of a title without the small words that any title has.
fn words(title: &str) -> BTreeSet<String> {
    let words = title.split(|it: char| !it.is_alphanumeric());
    let words = words.map(str::to_lowercase);
    let small = [
        "", "a", "and", "for", "from", "gpustow", "of", "s", "the", "to", "your",
    ];
    words
        .filter(|word| !small.contains(&word.as_str()))
        .collect()
}

#[test]
fn no_two_titles_are_alike() -> io::Result<()> {
    let mut seen = BTreeMap::new();
    for (title, target) in links(&page("SUMMARY.md")?) {
        let text = page(&target)?;
        let head = text.lines().find_map(|line| line.strip_prefix("# "));
        assert_eq!(head, Some(title.as_str()), "{target}");
        let other = seen.insert(words(&title), title.clone());
        assert_eq!(other, None, "{title} reads as another title");
    }
    Ok(())
}

/// Every page for users begins with a sentence that states its purpose, before any table, list or code.
#[test]
fn every_page_begins_with_its_purpose() -> io::Result<()> {
    for (_, target) in links(&page("SUMMARY.md")?) {
        let text = page(&target)?;
        let mut lines = text.lines();
        lines.find(|line| line.starts_with("# "));
        let next = lines.find(|line| !line.is_empty()).unwrap_or_default();
        let is_prose = next.starts_with(|it: char| it.is_alphabetic() || "*`[".contains(it));
        assert!(is_prose && !next.starts_with("* "), "{target}: {next}");
    }
    Ok(())
}

/// Name, severity and annotations of each alert.
fn alerts() -> io::Result<BTreeMap<String, (String, Vec<String>)>> {
    let rules = fs::read_to_string(root().join("manifests/alerts/gpustow.rules.yaml"))?;
    let alerts = rules.split("- alert: ").skip(1);
    let alerts = alerts.map(|rule| {
        let lines: Vec<_> = rule.lines().map(str::trim).collect();
        let value = |key: &str| lines.iter().find_map(|line| line.strip_prefix(key));
        let severity = value("severity: ").unwrap_or_default().to_owned();
        let keys = ["summary: ", "description: ", "runbook_url: "];
        let keys = keys.into_iter().filter(|key| value(key).is_some());
        let keys = keys.map(str::to_owned).collect();
        (lines[0].to_owned(), (severity, keys))
    });
    Ok(alerts.collect())
}

#[test]
fn table_of_runbooks_has_each_alert_with_its_first_command() -> io::Result<()> {
    let alerts = alerts()?;
    let mut shown = BTreeSet::new();
    for cells in rows(&page("runbooks.md")?).split_off(1) {
        let Some((name, target)) = links(&cells[0]).into_iter().next() else {
            continue;
        };
        let (severity, keys) = &alerts[&name];
        assert_eq!(keys.len(), 3, "{name} has {keys:?} alone");
        assert_eq!(cells[1], *severity, "{name}");
        let first = format!("\n\nFirst command: {}\n", cells[2]);
        let text = page(&target)?;
        assert!(text.contains(&first), "{target}: {first}");
        assert!(
            text.contains(&format!("**Severity**: {severity}")),
            "{name}"
        );
        shown.insert(name);
    }
    assert_eq!(shown, alerts.into_keys().collect());
    Ok(())
}
