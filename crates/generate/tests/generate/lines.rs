//! The price of lines: each part of the product has a budget of code lines. Who adds lines removes others.

use std::{fs, io};

use crate::tidy::{code_below, root};

/// Folders, and the lines of code that they have together at most: Rust without comments, blank lines and
/// unit tests. A budget goes down with each removal; a part that needs more takes it from another.
const BUDGETS: [(&str, usize); 19] = [
    ("crates/advice", 0),
];

#[test]
fn each_part_keeps_to_its_budget_of_lines() -> io::Result<()> {
    let (mut all, mut over) = (0, Vec::new());
    for (folder, budget) in BUDGETS {
        let code = code_below(&root().join(folder).join("src"))?;
        let lines = code.iter().flat_map(|(_, code)| code.lines());
        let lines = lines.filter(|line| !line.trim().is_empty()).count();
        println!("{folder:<24} {lines:>7} {budget:>7}");
        all += lines;
        if lines > budget {
            over.push(format!("{folder} has {lines} lines of code, {budget} at most"));
        }
    }
    println!("{:<24} {all:>7}", "all");
    assert!(over.is_empty(), "{over:?}");
    Ok(())
}
