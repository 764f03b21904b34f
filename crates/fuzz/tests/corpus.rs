//! The inputs that fuzzers found interesting, once more, and cut short.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gpustow_fuzz::TARGETS;

#[test]
fn every_input_of_the_corpora_is_survived() -> Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let folders: usize = fs::read_dir(&corpus)?.count();
    ensure!(
        folders == TARGETS.len(),
        "{} has other folders",
        corpus.display()
    );
    for (name, target) in TARGETS {
        let folder = corpus.join(name);
        let mut inputs = 0;
        for file in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let input = fs::read(file?.path())?;
            target(&input);
            target(&input[..input.len() / 2]);
            inputs += 1;
        }
        ensure!(inputs > 0, "{name} has no input");
    }
    Ok(())
}
