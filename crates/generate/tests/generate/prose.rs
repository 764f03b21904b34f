//! Every page is listed and written in plain words. CONTRIBUTING.md has the rule.

use std::process::Command;
use std::{fs, io};

use crate::root;
use crate::words::WORDS;

/// Words of a sentence.
const SENTENCE: usize = 30;

/// Name and text of each page that git knows or would add.
pub(crate) fn pages() -> io::Result<Vec<(String, String)>> {
    let mut git = Command::new("git");
    let list = git.args(["ls-files", "-co", "--exclude-standard", "*.md"]);
    let output = list.current_dir(root()).output()?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = names.lines().filter(|name| root().join(name).exists());
    names
        .map(|name| Ok((name.to_owned(), fs::read_to_string(root().join(name))?)))
        .collect()
}

/// Counts the words with a letter or a digit, so that the bars of a table are none.
fn words(text: &str) -> usize {
    let words = text.split_whitespace();
    words
        .filter(|it| it.chars().any(char::is_alphanumeric))
        .count()
}

/// Paragraphs, items and cells of tables, each in one line and without blocks of code.
pub(crate) fn paragraphs(page: &str) -> Vec<String> {
    let (mut all, mut open, mut fenced) = (Vec::new(), String::new(), false);
    for line in page.lines() {
        let text = line.trim();
        let fence = text.starts_with("```");
        fenced ^= fence;
        let item = text.starts_with(['*', '-', '#', '>', '|'])
            || text
                .split_once(". ")
                .is_some_and(|(number, _)| number.parse::<u8>().is_ok());
        if fenced || fence || text.is_empty() || line.starts_with("    ") || item {
            all.push(std::mem::take(&mut open));
        }
        if fenced || fence || line.starts_with("    ") {
            continue;
        }
        if text.starts_with('|') {
            all.extend(text.split(" | ").map(str::to_owned));
        } else {
            open += " ";
            open += text;
        }
    }
    all.push(open);
    all
}

/// The text with a word for each span of code, and links by their text.
pub(crate) fn spoken(paragraph: &str) -> String {
    let parts = paragraph.split('`').enumerate();
    let plain: String = parts
        .map(|(nth, part)| if nth % 2 == 0 { part } else { "X" })
        .collect();
    let mut links = plain.split("](");
    let first = links.next().unwrap_or_default().to_owned();
    links.fold(first, |text, rest| {
        text + rest.split_once(')').map_or(rest, |(_, behind)| behind)
    })
}

#[test]
fn every_page_is_in_the_summary_once() -> io::Result<()> {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md"))?;
    for (name, _) in pages()? {
        let Some(page) = name.strip_prefix("docs/") else {
            continue;
        };
        let times = summary.matches(&format!("]({page})")).count();
        assert!(
            page == "SUMMARY.md" || times == 1,
            "{name} is {times} times in docs/SUMMARY.md"
        );
    }
    Ok(())
}

#[test]
fn pages_use_plain_words_and_short_sentences() -> io::Result<()> {
    let mut wrong = Vec::new();
    for (name, page) in pages()? {
        for paragraph in paragraphs(&page) {
            let text = spoken(&paragraph);
            let lower = format!(" {} ", text.to_lowercase());
            let lower = lower.replace(['.', ',', ':', ';', '(', ')', '?'], " ");
            let said = WORDS
                .iter()
                .filter(|word| lower.contains(&format!(" {word} ")));
            wrong.extend(said.map(|word| format!("{name}: \"{word}\"")));
            let mut text = text;
            for end in [". ", "? ", ": ", "; "] {
                text = text.replace(end, "\n");
            }
            let long = text.lines().filter(|sentence| words(sentence) > SENTENCE);
            wrong.extend(long.map(|it| format!("{name}: {} words: {it}", words(it))));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// A span over a line's end is shown with a space in it.
#[test]
fn no_span_of_code_goes_over_a_lines_end() -> io::Result<()> {
    for (name, page) in pages()? {
        let mut fenced = false;
        for (line, number) in page.lines().zip(1..) {
            let fence = line.trim_start().starts_with("```");
            fenced ^= fence;
            assert!(
                fenced || fence || line.matches('`').count().is_multiple_of(2),
                "{name}:{number}: a span of code goes on in the next line"
            );
        }
    }
    Ok(())
}

#[test]
fn readme_quotes_the_packing_that_was_measured() -> io::Result<()> {
    let readme = fs::read_to_string(root().join("README.md"))?;
    let packing = fs::read_to_string(root().join("docs/packing.md"))?;
    let row = packing
        .lines()
        .find(|line| line.starts_with("| default | 95"));
    let cells = row.map(|row| row.trim_matches(['|', ' ']).split('|').map(str::trim));
    let tight = cells.and_then(Iterator::last).unwrap_or_default();
    let tight = tight.trim_matches('*');
    assert!(
        tight.contains('±') && readme.contains(tight),
        "README.md should quote {tight} %"
    );
    Ok(())
}
