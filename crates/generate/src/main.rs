//! Writes the generated files, or checks that they are up to date.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use gpustow_api::names;
use gpustow_generate::files;
use gpustow_generate::reference::pages;

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../manifests");
const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference");

/// Write the generated files: manifests, the dashboard and the reference in docs.
#[derive(Parser)]
#[command(name = "gpustow-generate")]
struct Args {
    /// Only tell whether what is there is up to date
    #[arg(long)]
    check: bool,
    /// The extended resource that pods ask for, in MiB
    #[arg(long, value_name = "NAME", default_value = names::GPU_MEM)]
    resource_name: String,
    /// A copy of manifests to write into instead
    #[arg(long, value_name = "DIR", default_value = MANIFESTS)]
    output: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let put = if args.check { check } else { write };
    let files = files(&args.resource_name)?;
    put(&args.output, &files)?;
    // A copy for another resource comes without documentation.
    if args.output == Path::new(MANIFESTS) {
        put(Path::new(REFERENCE), &pages(&files)?)?;
    }
    Ok(())
}

type Files = [(&'static str, String)];

fn write(folder: &Path, files: &Files) -> Result<()> {
    for (file, text) in files {
        let path = folder.join(file);
        let parent = path.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent)
            .and_then(|()| std::fs::write(&path, text))
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn check(folder: &Path, files: &Files) -> Result<()> {
    for (file, expected) in files {
        let text = std::fs::read_to_string(folder.join(file)).unwrap_or_default();
        let lines = text.lines().zip(expected.lines());
        let line = 1 + lines.take_while(|(old, new)| old == new).count();
        ensure!(
            text == *expected,
            "{file}:{line} is stale: run `make generate`"
        );
    }
    Ok(())
}
