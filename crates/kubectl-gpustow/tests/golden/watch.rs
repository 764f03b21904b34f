//! `-w`: a list again and again.

use std::fs;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use kubectl_gpustow::{Args, Screen, run};
use tokio::time::{Instant, sleep};

use crate::objects::{Files, waiting};

/// The output so far.
#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Printed {
    fn text(&self) -> Result<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(String::from_utf8(all.clone())?)
    }

    /// All of it, once it has this text.
    async fn with(&self, wanted: &str) -> Result<String> {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let text = self.text()?;
            if text.contains(wanted) {
                return Ok(text);
            }
            ensure!(Instant::now() < until, "no {wanted} in\n{text}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The output of `pods -w` in this form before and after a second pod has come.
async fn watched(form: &str) -> Result<(String, String)> {
    let files = Files::new(&format!("watch-{form}"), &[waiting("one", "")])?;
    let from = files.0.display().to_string();
    let words = [
        "kubectl-gpustow",
        "--from",
        &from,
        "pods",
        "-A",
        "-w",
        "-o",
        form,
    ];
    let (args, printed) = (Args::try_parse_from(words)?, Printed::default());
    let mut out = printed.clone();
    let watch = tokio::spawn(async move { run(args, &mut out, Screen::default()).await });
    let before = printed.with("one").await?;
    let begun = files.0.join("begun");
    fs::write(&begun, waiting("two", "").to_string())?;
    fs::rename(begun, files.0.join("second.json"))?;
    let after = printed.with("two").await?;
    watch.abort();
    let new = after.strip_prefix(&before);
    Ok((
        before.clone(),
        new.context("printed other than before")?.to_owned(),
    ))
}

#[tokio::test]
async fn watched_list_prints_what_has_come_and_no_line_again() -> Result<()> {
    let (before, new) = watched("name").await?;
    assert_eq!((before.as_str(), new.as_str()), ("pod/one\n", "pod/two\n"));
    let (_, new) = watched("table").await?;
    ensure!(!new.contains(" one "), "{new}");
    Ok(())
}

#[tokio::test]
async fn watched_documents_are_printed_whole() -> Result<()> {
    let (before, new) = watched("json").await?;
    for text in [before, new] {
        let list: serde_json::Value = serde_json::from_str(&text)?;
        assert_eq!(list["kind"], "GpuPodList");
    }
    let (before, new) = watched("yaml").await?;
    ensure!(
        before.starts_with("---\n") && new.starts_with("---\n"),
        "{before}{new}"
    );
    Ok(())
}
