//! Writes the generated manifests, or checks that they are what would be written.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use gpustow_api::names;
use gpustow_generate::files;

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../manifests");
/// Write the generated files below manifests: the custom resource, the admission policies and the dashboard.
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
    let files = files(&args.resource_name)?;
    if args.check {
        check(&args.output, &files)
    } else {
        write(&args.output, &files)
    }
}

type Files = [(&'static str, String)];

fn write(manifests: &Path, files: &Files) -> Result<()> {
    for (file, text) in files {
        let path = manifests.join(file);
        let folder = path.parent().unwrap_or(manifests);
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&path, text))
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn check(manifests: &Path, files: &Files) -> Result<()> {
    for (file, expected) in files {
        let text = std::fs::read_to_string(manifests.join(file)).unwrap_or_default();
        let lines = text.lines().zip(expected.lines());
        let line = 1 + lines.take_while(|(old, new)| old == new).count();
        ensure!(
            text == *expected,
            "manifests/{file}:{line} is stale: run `make generate`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_files_are_the_generated_ones() -> Result<()> {
        check(Path::new(MANIFESTS), &files(names::GPU_MEM)?)
    }

    #[test]
    fn a_stale_tree_is_told_where_and_how_to_mend() -> Result<()> {
        let error = check(Path::new("/nonexistent"), &files(names::GPU_MEM)?);
        assert_eq!(
            error.err().map(|error| error.to_string()).as_deref(),
            Some("manifests/core/crd.yaml:1 is stale: run `make generate`")
        );
        Ok(())
    }
}
