//! Links in Markdown: each leads to a file, and to a heading where it names one.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::{fs, io};

use gpustow_api::names;

use crate::root;

/// Where the repository's files are read; a page of the book links to those outside of docs there.
const BLOB: &str = "https://github.com/gpustow/gpustow/blob/main/";

/// The pages that git knows or would add.
fn pages() -> io::Result<Vec<PathBuf>> {
    let mut git = Command::new("git");
    let list = git.args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.md",
    ]);
    let output = list.current_dir(root()).output()?;
    let names = String::from_utf8_lossy(&output.stdout);
    let pages = names.lines().map(|name| root().join(name));
    Ok(pages.filter(|it| it.exists()).collect())
}

/// The page without its blocks and spans of code, in which brackets are no links.
fn prose(page: &str) -> String {
    let mut fenced = false;
    let lines = page.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The text in parentheses behind a bracket.
fn links(prose: &str) -> impl Iterator<Item = &str> {
    let ends = prose.split("](").skip(1);
    ends.filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// The anchors that GitHub gives headings: https://docs.github.com/get-started, "Section links".
fn anchors(prose: &str) -> BTreeSet<String> {
    let headings = prose.lines().filter_map(|line| {
        let text = line.trim_start_matches('#');
        (text.len() < line.len()).then_some(text.strip_prefix(' ')?)
    });
    let mut all = BTreeSet::new();
    for heading in headings {
        let kept = heading.trim().to_lowercase();
        let kept = kept
            .chars()
            .filter(|it| it.is_alphanumeric() || " -_".contains(*it));
        let anchor: String = kept.map(|it| if it == ' ' { '-' } else { it }).collect();
        let again = (1..).map(|nth| format!("{anchor}-{nth}"));
        let mut names = std::iter::once(anchor.clone()).chain(again);
        all.extend(names.find(|name| !all.contains(name)));
    }
    all
}

#[test]
fn every_link_leads_somewhere() -> io::Result<()> {
    let (mut dead, mut led_to) = (Vec::new(), BTreeSet::new());
    let mut seen = 0;
    let docs = root().join("docs").canonicalize()?;
    let is_ours =
        |it: &&str| it.starts_with(BLOB) || !it.contains("://") && !it.starts_with("mailto:");
    for page in pages()? {
        let text = prose(&fs::read_to_string(&page)?);
        for link in links(&text).filter(is_ours) {
            seen += 1;
            let (folder, rest) = match link.strip_prefix(BLOB) {
                Some(rest) => (root(), rest),
                None => (page.parent().unwrap_or(&page).to_owned(), link),
            };
            let (path, anchor) = rest.split_once('#').unwrap_or((rest, ""));
            let target = match path.is_empty() {
                true => page.clone(),
                false => folder.join(path),
            };
            if target != page && !page.ends_with("SUMMARY.md") {
                led_to.extend(target.canonicalize());
            }
            // The book does not have pages for folders.
            let is_page =
                target.is_file() || target.is_dir() && !page.canonicalize()?.starts_with(&docs);
            let leads = (is_page || link.starts_with(BLOB) && target.exists())
                && (anchor.is_empty()
                    || anchors(&prose(&fs::read_to_string(&target)?)).contains(anchor));
            if !leads {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "dead links:\n{}", dead.join("\n"));
    let all = pages()?
        .into_iter()
        .filter_map(|page| page.canonicalize().ok());
    let alone = all.filter(|page| page.starts_with(&docs) && !led_to.contains(page));
    let mut alone: Vec<_> = alone.collect();
    alone.retain(|page| !page.ends_with("SUMMARY.md"));
    assert!(alone.is_empty(), "no other page leads to {alone:#?}");
    assert!(
        seen > 100,
        "only {seen} links found: the test is out of date"
    );
    Ok(())
}

#[test]
fn page_of_tenants_keys_names_each_key_that_a_pod_may_have() -> io::Result<()> {
    let page = fs::read_to_string(root().join("docs/tenant-keys.md"))?;
    let keys = names::POD_KEYS.iter().map(|key| format!("`{key}`"));
    let of_containers = names::POD_KEYS_OF.iter();
    let keys = keys.chain(of_containers.map(|key| format!("`{key}CONTAINER`")));
    let labels = names::POD_GROUP_LABELS
        .iter()
        .chain([&names::MANAGED_LABEL]);
    let keys = keys.chain(labels.map(|key| format!("`{key}`")));
    let missing: Vec<_> = keys.filter(|key| !page.contains(key)).collect();
    assert!(
        missing.is_empty(),
        "docs/tenant-keys.md: say what a tenant may take by {missing:?}"
    );
    Ok(())
}
