//! The words that programs, chart and policies do not use where users read them; `prose` holds the pages to the same list.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::root;

/// Old-fashioned or private words: say it in Kubernetes' or the field's.
pub(crate) const WORDS: [&str; 17] = [
    "nobody",
    "somebody",
    "anybody",
    "whoever",
    "whom",
    "anew",
    "bear",
    "bears",
    "mend",
    "mends",
    "in vain",
    "for long",
    "let be",
    "of no avail",
    "of yours",
    "of gpustow's",
    "so many",
];

/// Those of them that no code has either: no comment, name or text.
pub(crate) const IN_NO_CODE: [&str; 6] =
    ["nobody", "somebody", "whoever", "whom", "anew", "in vain"];

/// The crates whose texts users see.
pub(crate) const CRATES: [&str; 11] = [
    "agent",
    "api",
    "books",
    "inspect",
    "kubectl-gpustow",
    "ledger",
    "means",
    "pack",
    "policies",
    "serve",
    "settings",
];

/// The files below a folder whose names end like this.
pub(crate) fn below(folder: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(below(&path, ending)?);
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    Ok(found)
}

/// The string literals of a program, without what stands in braces.
pub(crate) fn literals(source: &str) -> Vec<String> {
    let product = source.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = product.lines();
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let code = code.replace("'\"'", "").replace("\\\"", "'");
    let texts = code.split('"').skip(1).step_by(2);
    let without_names = texts.map(|text| {
        let parts = text.split('{');
        let parts = parts.enumerate().map(|(nth, part)| match nth {
            0 => part,
            _ => part.split_once('}').map_or("", |(_, after)| after),
        });
        parts.collect::<Vec<_>>().join(" ")
    });
    without_names.collect()
}

/// The lines of help that clap makes of comments.
fn help(source: &str) -> Vec<String> {
    let lines = source.lines();
    let lines = lines.filter_map(|line| line.trim_start().strip_prefix("///"));
    lines.map(str::to_owned).collect()
}

/// The words of the list that a text has.
fn found(text: &str) -> Vec<&'static str> {
    let words = text.split(|it: char| !it.is_alphanumeric());
    let words: Vec<String> = words
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let text = format!(" {} ", words.join(" "));
    let has = |word: &&str| text.contains(&format!(" {word} "));
    WORDS.into_iter().filter(has).collect()
}

#[test]
fn users_read_the_words_of_kubernetes() -> io::Result<()> {
    let root = root();
    let mut texts: Vec<(PathBuf, String)> = Vec::new();
    let mut read = |path: PathBuf, of: &dyn Fn(&str) -> Vec<String>| -> io::Result<()> {
        let all = of(&fs::read_to_string(&path)?);
        texts.extend(all.into_iter().map(|text| (path.clone(), text)));
        Ok(())
    };
    let whole = |text: &str| vec![text.to_owned()];
    for file in ["values.yaml", "templates/NOTES.txt", "README.md"] {
        read(root.join("manifests/chart").join(file), &whole)?;
    }
    let crates = CRATES.map(|name| root.join("crates").join(name).join("src"));
    for folder in crates.into_iter().chain([root.join("src")]) {
        for program in below(&folder, ".rs")? {
            if program.ends_with("args.rs") {
                read(program.clone(), &help)?;
            }
            if !program.ends_with("tests.rs") {
                read(program, &literals)?;
            }
        }
    }
    for policy in below(&root.join("crates/policies/policies"), ".yaml")? {
        let without_comments = |text: &str| {
            let lines = text.lines();
            let lines = lines.filter(|line| !line.trim_start().starts_with('#'));
            lines.map(str::to_owned).collect()
        };
        read(policy, &without_comments)?;
    }
    assert!(texts.len() > 1000, "{}", texts.len());
    let wrong: Vec<String> = texts
        .iter()
        .filter_map(|(path, text)| {
            let found = found(text);
            let shown: String = text.trim().chars().take(90).collect();
            (!found.is_empty()).then(|| format!("{}: {found:?}: {shown}", path.display()))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
