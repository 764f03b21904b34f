//! The promises of the source tree: the decision depends on nothing, the ledger on no client, runtime or clock. Each
//! set of strings is spelled in one file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::root;

/// The libraries that `package` and its dependencies are, at most `depth` steps away, as cargo
/// resolves them.
fn tree(package: &str, depth: &str) -> io::Result<Vec<String>> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--locked",
            "--prefix",
            "none",
            "--format",
            "{lib}",
        ])
        .args([
            "--edges",
            "normal,build",
            "--package",
            package,
            "--depth",
            depth,
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| !line.ends_with("(*)"))
        .map(str::to_owned)
        .collect())
}

#[test]
fn pack_depends_on_nothing() -> io::Result<()> {
    assert_eq!(tree("gpustow-pack", "9")?, ["gpustow_pack"]);
    Ok(())
}

#[test]
fn ledger_depends_on_no_client_and_no_runtime() -> io::Result<()> {
    let barred = ["kube_client", "kube_runtime", "hyper", "tokio", "rustls"];
    for library in tree("gpustow-ledger", "9")? {
        assert!(
            !barred.contains(&library.as_str()),
            "the ledger must not depend on {library}, through any crate"
        );
    }
    Ok(())
}

#[test]
fn serve_depends_on_no_crate_of_ours() -> io::Result<()> {
    let mut ours = tree("gpustow-serve", "9")?;
    ours.retain(|library| library.contains("gpustow"));
    assert_eq!(ours, ["gpustow_serve"]);
    Ok(())
}

#[test]
fn the_simulator_depends_on_no_program_of_ours() -> io::Result<()> {
    let mut ours = tree("gpustow-sim", "9")?;
    ours.retain(|library| library.contains("gpustow"));
    ours.sort();
    ours.dedup();
    assert_eq!(
        ours,
        [
            "gpustow_advice",
            "gpustow_api",
            "gpustow_books",
            "gpustow_ledger",
            "gpustow_means",
            "gpustow_pack",
            "gpustow_queue",
            "gpustow_sim"
        ]
    );
    Ok(())
}

#[test]
fn inspect_draws_nothing() -> io::Result<()> {
    for library in tree("gpustow-inspect", "1")? {
        let draws = ["ratatui", "crossterm", "axum"].contains(&library.as_str());
        assert!(!draws, "{library}");
    }
    Ok(())
}

/// Where extender and agent run in one shell, a variable that is set for one must suit the other.
#[test]
fn an_environment_variable_means_one_thing() -> io::Result<()> {
    let shared = ["GPUSTOW_KUBECONFIG", "GPUSTOW_LOG", "GPUSTOW_RESOURCE_NAME"];
    let variables = |file: &str| -> io::Result<Vec<String>> {
        let text = fs::read_to_string(root().join(file))?;
        let names = text.split("env = \"").skip(1);
        Ok(names
            .filter_map(|rest| Some(rest.split_once('"')?.0.to_owned()))
            .collect())
    };
    let mut extender = variables("src/args.rs")?;
    extender.extend(variables("crates/settings/src/lib.rs")?);
    for name in variables("crates/agent/src/args.rs")? {
        let both = extender.contains(&name);
        assert_eq!(both, shared.contains(&name.as_str()), "{name}");
    }
    Ok(())
}

/// As far as a look at the source can show: the caller passes the time in, and nothing waits.
#[test]
fn pack_and_ledger_read_no_clock_and_never_wait() -> io::Result<()> {
    for library in LEDGER.iter().chain(&["crates/pack/src"]) {
        for (path, code) in code_below(&root().join(library))? {
            for word in [
                "::now(",
                "async fn",
                "async move",
                ".await;",
                ".await?",
                ".await.",
                "thread::",
            ] {
                assert!(
                    !code.contains(word),
                    "{} must not use {word}",
                    path.display()
                );
            }
        }
    }
    Ok(())
}

/// Delays and ages are counted on the monotonic clock: code that wants the time of day gets it in `Now`.
#[test]
fn the_agent_reads_the_time_of_day_in_one_file() -> io::Result<()> {
    let home = root().join("crates/agent/src/clock.rs");
    for (path, code) in code_below(&root().join("crates/agent/src"))? {
        let reads = ["SystemTime", "Timestamp::now("];
        let reads = reads.iter().any(|word| code.contains(word));
        assert_eq!(reads, path == home, "{}", path.display());
    }
    Ok(())
}

/// The crates of the ledger, each of which may use those before it.
const LEDGER: [&str; 4] = [
    "crates/books/src",
    "crates/queue/src",
    "crates/means/src",
    "crates/ledger/src",
];

fn ledger_code() -> io::Result<Vec<(PathBuf, String)>> {
    let all = LEDGER.iter().map(|it| code_below(&root().join(it)));
    Ok(all.collect::<io::Result<Vec<_>>>()?.concat())
}

/// Only a verb of the ledger's books changes them, and scores and queue follow it: no other code reaches a field.
#[test]
fn no_field_of_the_ledger_is_visible_outside_its_part() -> io::Result<()> {
    for (path, code) in ledger_code()? {
        for line in code.lines() {
            let visible = line.trim_start().strip_prefix("pub(crate) ");
            let field = visible.and_then(|rest| rest.split_once(':'));
            let is_name = |name: &str| name.chars().all(|c| c == '_' || c.is_alphanumeric());
            let is_field = field.is_some_and(|(name, _)| is_name(name));
            assert!(!is_field, "{}: {line}", path.display());
        }
    }
    Ok(())
}

/// A what-if that is put together by hand forgets something.
#[test]
fn fits_are_asked_for_in_the_trial() -> io::Result<()> {
    let mut asks = Vec::new();
    for (path, code) in ledger_code()? {
        let fits = [".fit_within(", ".fit_among("];
        if fits.iter().any(|call| code.contains(call)) {
            asks.push(path);
        }
    }
    assert_eq!(asks, [root().join("crates/books/src/trial.rs")]);
    Ok(())
}

/// Comments, names and texts, of tests too. `words` alone spells the words.
#[test]
fn code_is_written_in_plain_words() -> io::Result<()> {
    let words = crate::words::IN_NO_CODE.join("|").replace(' ', "[ _-]");
    let mut git = Command::new("git");
    let grep = git.args(["grep", "--untracked", "-niE", &words, "--", ":!*/words.rs"]);
    let grep = grep.args([
        "*.rs", "*.sh", "*.yaml", "*.js", "*.mjs", "*.patch", "Makefile",
    ]);
    let output = grep.current_dir(root()).output()?;
    let found = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{found}");
    Ok(())
}

#[test]
fn our_keys_are_spelled_in_names_alone() -> io::Result<()> {
    spelled_only_in(
        &["crates/api/src/names.rs"],
        &["gpustow.dev/", "NVIDIA_VISIBLE_DEVICES"],
    )
}

#[test]
fn kube_schedulers_fields_are_spelled_in_wire_alone() -> io::Result<()> {
    let fields = [
        "NodeNames",
        "FailedNodes",
        "FailedAndUnresolvable",
        "NumPDBViolations",
    ];
    // The other side of the calls shares no code with ours, or it would share its mistakes.
    spelled_only_in(&["src/wire.rs", "crates/simworld/src/extender.rs"], &fields)
}

/// Fails if a file of the product other than `homes` has one of `words` in its code, or one of these none.
fn spelled_only_in(homes: &[&str], words: &[&str]) -> io::Result<()> {
    let mut homes: BTreeMap<_, _> = homes.iter().map(|it| (root().join(it), false)).collect();
    for (path, code) in code_below(&root().join("src"))?
        .into_iter()
        .chain(crate_code()?)
    {
        for word in words.iter().filter(|word| code.contains(*word)) {
            let home = homes.get_mut(&path);
            assert!(home.is_some(), "{word} is in {}", path.display());
            home.into_iter().for_each(|used| *used = true);
        }
    }
    let unused: Vec<_> = homes.iter().filter(|(_, used)| !**used).collect();
    assert!(
        unused.is_empty(),
        "{unused:?} have none of {words:?}: the test is out of date"
    );
    Ok(())
}

/// The product's crates, that is, all but the one that only tests use.
fn crate_code() -> io::Result<Vec<(PathBuf, String)>> {
    let mut code = Vec::new();
    for entry in fs::read_dir(root().join("crates"))? {
        let src = entry?.path().join("src");
        if !src.starts_with(root().join("crates/testkit")) && src.exists() {
            code.extend(code_below(&src)?);
        }
    }
    Ok(code)
}

/// The Rust files below `folder` without comments and unit tests.
pub(crate) fn code_below(folder: &Path) -> io::Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(code_below(&path)?);
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            let text = fs::read_to_string(&path)?;
            let product = text.split("#[cfg(test)]\nmod").next().unwrap_or_default();
            let code = product
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            found.push((path, code.collect::<Vec<_>>().join("\n")));
        }
    }
    Ok(found)
}

/// Each function of the product that calls itself, and the bound of its depth. No value that a tenant writes may be the
/// bound.
const RECURSIVE: [(&str, &str, &str); 12] = [
    (
        "generate/src/reference/flags.rs",
        "of_command",
        "our commands",
    ),
    (
        "inspect/src/source/files.rs",
        "add",
        "the depth of JSON, 128 in serde_json",
    ),
    (
        "ledger/src/provision/kinds.rs",
        "left_of",
        "PODS of provision.rs, and MOST_PODS of a gang",
    ),
    ("means/src/defragment/asking.rs", "ask_on", "once"),
    (
        "means/src/defragment/moves.rs",
        "find",
        "pods of one node that move",
    ),
    (
        "pack/src/links.rs",
        "choose",
        "GPUs of a pod, and MAX_STEPS",
    ),
    (
        "pack/src/search.rs",
        "choose",
        "GPUs of a pod, and MAX_STEPS",
    ),
    (
        "pack/src/several.rs",
        "choose",
        "GPUs of a pod, and MAX_STEPS",
    ),
    (
        "policies/src/admission.rs",
        "difference",
        "the depth of JSON, 128 in serde_json",
    ),
    ("policies/src/manifests.rs", "fill", "our templates"),
    ("policies/src/values.rs", "plain", "our schema"),
    ("simworld/src/patch.rs", "merge", "patches of tests"),
];

/// Does the function call itself? Its lines follow the one that begins it.
fn calls_itself<'l>(begin: &str, name: &str, lines: impl Iterator<Item = &'l str>) -> bool {
    let indent = begin.len() - begin.trim_start().len();
    let end = format!("{}}}", " ".repeat(indent));
    let mut body = lines.take_while(|line| *line != end);
    let of_type = [format!("self.{name}("), format!("Self::{name}(")];
    let own = [format!("{name}("), format!("({name})")];
    body.any(|line| match indent {
        0 => own.iter().any(|call| {
            let mut found = line.match_indices(call.as_str());
            found.any(|(at, _)| {
                let before = line[..at].chars().next_back();
                !before.is_some_and(|it| it.is_alphanumeric() || "_.:".contains(it))
                    || call.starts_with('(') && line[..at].ends_with("for_each")
            })
        }),
        _ => of_type.iter().any(|call| line.contains(call.as_str())),
    })
}

#[test]
fn every_function_that_calls_itself_has_a_bound() -> io::Result<()> {
    let mut code = crate_code()?;
    code.extend(code_below(&root().join("src"))?);
    let mut found = Vec::new();
    for (path, text) in &code {
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let Some((before, rest)) = line.split_once("fn ") else {
                continue;
            };
            let name = rest.split(['(', '<']).next().unwrap_or_default();
            let is_definition = before.trim().split(' ').all(|word| {
                word.is_empty() || word.starts_with("pub") || ["async", "const"].contains(&word)
            });
            if is_definition && calls_itself(line, name, lines[at + 1..].iter().copied()) {
                let file = path.to_string_lossy().replace('\\', "/");
                let file = file.rsplit_once("crates/").map_or(&*file, |(_, file)| file);
                if !file.starts_with("fuzz/") {
                    found.push((file.to_owned(), name.to_owned()));
                }
            }
        }
    }
    found.sort();
    let known = RECURSIVE.map(|(file, name, _)| (file.to_owned(), name.to_owned()));
    assert_eq!(found, known, "name each with what bounds its depth");
    Ok(())
}

#[test]
fn every_test_that_architecture_names_exists() -> io::Result<()> {
    let root = root();
    let page = fs::read_to_string(root.join("ARCHITECTURE.md"))?;
    let (_, invariants) = page
        .split_once("## Invariants and the tests that hold them")
        .ok_or_else(|| io::Error::other("ARCHITECTURE.md has no list of invariants"))?;
    let (invariants, _) = invariants.split_once("\n## ").unwrap_or((invariants, ""));
    let numbers = invariants
        .lines()
        .filter_map(|line| line.split_once(". **")?.0.parse().ok());
    let numbers: Vec<usize> = numbers.collect();
    assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>());
    let mut file = String::new();
    let mut named = 0;
    for quoted in invariants.split('`').skip(1).step_by(2) {
        if quoted.ends_with(".rs") && quoted.contains('/') {
            file = fs::read_to_string(root.join(quoted))?;
        } else if quoted.contains('_') && quoted.chars().all(|c| c == '_' || c.is_lowercase()) {
            assert!(file.contains(&format!("fn {quoted}(")), "no test {quoted}");
            named += 1;
        }
    }
    assert!(named >= 9, "only {named} tests named");
    Ok(())
}

/// `make test-versions` picks its cases by name, where a name of no case would select nothing.
#[test]
fn every_case_that_the_versions_run_exists() -> io::Result<()> {
    let script = fs::read_to_string(root().join("tests/versions/run.sh"))?;
    let list = script
        .split_once("<<'LIST'\n")
        .and_then(|(_, list)| list.split_once("\nLIST\n"));
    let (list, _) = list.ok_or_else(|| io::Error::other("run.sh has no list of cases"))?;
    for line in list.lines() {
        let name = line.split('|').nth(1).unwrap_or_default();
        // The same cases with another Helm.
        let name = name.replace("helm3::", "helm::");
        let (module, case) = name.rsplit_once("::").unwrap_or_default();
        let file = format!("{}.rs", module.replace("::", "/"));
        let programs = ["integration", "simulate"].map(|it| root().join("tests").join(it));
        let code = programs.map(|it| fs::read_to_string(it.join(&file)).unwrap_or_default());
        let has = code
            .iter()
            .any(|code| code.contains(&format!("fn {case}(")));
        assert!(has, "no test program has {case} in {file}");
    }
    Ok(())
}

/// `make teeth` takes mends out of the code again: their patches follow it.
#[test]
fn every_mend_can_be_taken_out_again() -> io::Result<()> {
    let mut patches = 0;
    for folder in ["", "worlds", "cases"] {
        for entry in fs::read_dir(root().join("tests/teeth").join(folder))? {
            let patch = entry?.path();
            if patch.extension().is_some_and(|it| it == "patch") {
                let mut git = Command::new("git");
                let applied = git.args(["apply", "--check"]).arg(&patch);
                let output = applied.current_dir(root()).output()?;
                let why = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{}: {why}", patch.display());
                patches += 1;
            }
        }
    }
    assert!(patches > 0);
    Ok(())
}
