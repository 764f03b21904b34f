//! Invariant: the decision depends on nothing, the ledger on no client, runtime or clock.

use std::path::Path;
use std::process::Command;
use std::{fs, io};

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
    let allowed = [
        "gpustow_ledger",
        "gpustow_api",
        "gpustow_pack",
        "hashbrown",
        "thiserror",
    ];
    for library in tree("gpustow-ledger", "1")? {
        assert!(
            allowed.contains(&library.as_str()),
            "the ledger must not depend on {library}"
        );
    }
    Ok(())
}

/// What a look at the source can tell: the caller passes the time in, and nothing waits.
#[test]
fn pack_and_ledger_read_no_clock_and_never_wait() -> io::Result<()> {
    let sources = ["src", "src/policy", "../ledger/src"];
    for source in sources {
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(source))? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = fs::read_to_string(&path)?;
            for word in ["::now(", "async fn", "async move", ".await", "thread::"] {
                assert!(
                    !text.contains(word),
                    "{} must not use {word}",
                    path.display()
                );
            }
        }
    }
    Ok(())
}
