//! Each case of the tests belongs to one target of the Makefile.

use std::path::Path;
use std::{fs, io};

use crate::root;

/// The names of the cases of a test program, as cargo prints them.
pub(crate) fn cases(program: &Path, module: &str) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(program)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let inner = match name.as_ref() {
            "main" | "mod" => module.to_owned(),
            _ => format!("{module}{name}::"),
        };
        if path.is_dir() {
            found.extend(cases(&path, &inner)?);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path)?;
            let tests = text.lines().zip(text.lines().skip(1));
            let tests = tests.filter(|(line, _)| {
                let line = line.trim();
                line.starts_with("#[test") || line.starts_with("#[tokio::test")
            });
            found.extend(tests.filter_map(|(_, next)| {
                let (_, rest) = next.split_once("fn ")?;
                Some(format!("{inner}{}", rest.split_once('(')?.0))
            }));
        }
    }
    Ok(found)
}

/// The words of a variable of the Makefile.
fn words(makefile: &str, variable: &str) -> Vec<String> {
    let defined = format!("{variable} := ");
    let line = makefile.lines().find_map(|it| it.strip_prefix(&defined));
    let words = line.unwrap_or_default().split_whitespace();
    words.map(str::to_owned).collect()
}

fn any(patterns: &[String], case: &str) -> bool {
    patterns.iter().any(|pattern| case.contains(pattern))
}

#[test]
fn each_case_belongs_to_one_target() -> io::Result<()> {
    let makefile = fs::read_to_string(root().join("Makefile"))?;
    let versions = fs::read_to_string(root().join("tests/versions/run.sh"))?;
    let beside = words(&makefile, "BESIDE");
    let gangs = words(&makefile, "GANGS");
    let worlds = words(&makefile, "WORLDS_ALONE");
    let mut counted = 0;
    for program in ["integration", "simulate"] {
        for case in cases(&root().join("tests").join(program), "")? {
            let no_control_plane = program == "simulate" && !case.contains("control_plane::");
            let with_cluster = ![&beside, &gangs, &worlds].iter().any(|it| any(it, &case));
            let with_others = program == "integration" && any(&beside, &case);
            let on_other_minor = any(&gangs, &case) && versions.contains(&format!("|{case}|1.37"));
            let targets = [no_control_plane, with_cluster, with_others, on_other_minor];
            let targets = targets.iter().filter(|is| **is).count();
            assert_eq!(targets, 1, "{program}: {case} belongs to {targets} targets");
            counted += 1;
        }
    }
    assert!(counted > 250, "only {counted} cases found");
    Ok(())
}

/// `cargo test` leaves these programs alone.
#[test]
fn each_test_program_is_named_by_a_target() -> io::Result<()> {
    let makefile = fs::read_to_string(root().join("Makefile"))?;
    for manifest in ["Cargo.toml", "crates/testkit/Cargo.toml"] {
        let manifest = fs::read_to_string(root().join(manifest))?;
        for program in manifest.split("[[test]]").skip(1) {
            let program = program.split("\n[").next().unwrap_or_default();
            let name = program.lines().find_map(|it| it.strip_prefix("name = "));
            let name = name.unwrap_or_default().trim_matches('"');
            if program.contains("test = false") {
                let named = format!("--test {name} ");
                assert!(makefile.contains(&named), "no target runs {name}");
            }
        }
    }
    Ok(())
}
