//! Writes the generated manifests, or checks that they are what would be written.

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
    // A copy for another resource has no documentation.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_files_are_the_generated_ones() -> Result<()> {
        let files = files(names::GPU_MEM)?;
        check(Path::new(MANIFESTS), &files)?;
        check(Path::new(REFERENCE), &pages(&files)?)
    }

    #[test]
    fn the_reference_has_only_generated_pages() -> Result<()> {
        let pages = pages(&files(names::GPU_MEM)?)?;
        for entry in std::fs::read_dir(REFERENCE)? {
            let name = entry?.file_name();
            let is_generated = pages.iter().any(|(page, _)| name == *page);
            ensure!(is_generated, "{name:?} is not generated: remove it");
        }
        Ok(())
    }

    #[test]
    fn a_stale_tree_is_told_where_and_how_to_mend() -> Result<()> {
        let error = check(Path::new("/nonexistent"), &files(names::GPU_MEM)?);
        assert_eq!(
            error.err().map(|error| error.to_string()).as_deref(),
            Some("core/crd.yaml:1 is stale: run `make generate`")
        );
        Ok(())
    }
}
