//! The price of lines: each part of the product has a budget of code lines. Who adds lines removes others.

use std::io;

use crate::root;
use crate::tidy::code_below;

/// Parts, their folders, and the most lines of code that they have: Rust without comments, blank lines and unit tests.
/// A removal lowers its part's budget. A part that needs more takes it from another, and the commit gives the reason.
const BUDGETS: [(&str, &[&str], usize); 17] = [
    (
        "ledger",
        &[
            "crates/ledger",
            "crates/books",
            "crates/queue",
            "crates/means",
        ],
        15_915,
    ),
    ("extender", &["."], 9_147),
    ("testkit", &["crates/testkit"], 7_088),
    ("kubectl-gpustow", &["crates/kubectl-gpustow"], 7_346),
    ("agent", &["crates/agent"], 5_809),
    ("api", &["crates/api"], 4_613),
    ("sim", &["crates/sim"], 4_177),
    ("pack", &["crates/pack"], 2_483),
    // It took the place of 1,400 lines of CEL and of 1,350 lines of the policies' crate. Time-slicing and MIG names are 146.
    ("admission", &["crates/admission"], 1_964),
    ("demo", &["crates/demo"], 1_846),
    ("inspect", &["crates/inspect"], 1_792),
    ("simulated NVML", &["crates/fake-nvml"], 1_237),
    ("generate", &["crates/generate"], 999),
    ("serve", &["crates/serve"], 842),
    (
        "small crates",
        &["crates/fuzz", "crates/advice", "crates/settings"],
        1_145,
    ),
    ("simworld", &["crates/simworld"], 697),
    ("policies", &["crates/policies"], 412),
];

#[test]
fn each_part_keeps_to_its_budget_of_lines() -> io::Result<()> {
    let (mut all, mut over) = (0, Vec::new());
    println!("{:<16} {:>7} {:>7}", "part", "lines", "budget");
    for (part, folders, budget) in BUDGETS {
        let mut lines = 0;
        for folder in folders {
            let code = code_below(&root().join(folder).join("src"))?;
            let code = code.iter().flat_map(|(_, code)| code.lines());
            lines += code.filter(|line| !line.trim().is_empty()).count();
        }
        println!("{part:<16} {lines:>7} {budget:>7}");
        all += lines;
        if lines > budget {
            over.push(format!(
                "{part} has {lines} lines of code, {budget} at most"
            ));
        }
    }
    println!("{:<16} {all:>7}", "all");
    assert!(over.is_empty(), "{over:?}");
    Ok(())
}

/// A function has so many lines of code at most.
const LINES: usize = 70;

#[test]
fn functions_have_at_most_70_lines() -> io::Result<()> {
    let mut long = Vec::new();
    let folders = BUDGETS.iter().flat_map(|(_, folders, _)| *folders);
    for folder in folders {
        for (path, code) in code_below(&root().join(folder).join("src"))? {
            let mut lines = code.lines().filter(|line| !line.trim().is_empty());
            while let Some(first) = lines.next() {
                let words: Vec<&str> = first.split_whitespace().collect();
                let is_before = |it: &&str| {
                    matches!(*it, "async" | "const" | "unsafe") || it.starts_with("pub")
                };
                let mut rest = words.iter().skip_while(|it| is_before(it));
                if rest.next() != Some(&"fn") || first.ends_with(['}', ';']) {
                    continue;
                }
                let indent = |line: &str| line.len() - line.trim_start().len();
                let ends = |line: &str| {
                    let declares = line.trim_start().starts_with(')') && line.ends_with(';');
                    indent(line) == indent(first) && (line.trim() == "}" || declares)
                };
                let count = 2 + lines.by_ref().take_while(|line| !ends(line)).count();
                if count > LINES {
                    let name = rest.next().unwrap_or(&"");
                    long.push(format!("{}: {name}: {count}", path.display()));
                }
            }
        }
    }
    assert!(long.is_empty(), "more than {LINES} lines: {long:#?}");
    Ok(())
}
