//! The parts of a process that the extender and the agent share.

use std::fmt;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// How long a watch may last before it is asked for again, so that a dead connection is noticed.
pub const WATCH_SECONDS: u32 = 60;
/// An answer whose next piece takes longer than a quiet watch does never comes.
const SILENCE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 15);

/// Why there is no way to the API server.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Neither a flag nor a pod's account.
    #[error(
        "no way to the API server: give --kubeconfig FILE, or run in a pod with a ServiceAccount"
    )]
    NoWay(#[from] kube::config::InferConfigError),
    /// The file that the flag names cannot be used.
    #[error("--kubeconfig {file}")]
    Kubeconfig {
        /// As it was given.
        file: String,
        /// The error in the file.
        source: kube::config::KubeconfigError,
    },
    /// The configuration makes no client.
    #[error("cannot set up the client of the API server")]
    Client(#[from] kube::Error),
}

/// What an operator may set about either.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Process")]
pub struct DaemonArgs {
    /// kubeconfig file; without it the environment's or the pod's ServiceAccount is used
    #[arg(long, env = "GPUSTOW_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Log these levels, as in `info` or `gpustow=debug,kube=warn`
    #[arg(long, env = "GPUSTOW_LOG", default_value = "info")]
    log: String,

    /// How to log
    #[arg(long, env = "GPUSTOW_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The filter does not parse.
    #[error("--log {log:?}: use a form like info or gpustow=debug")]
    Filter {
        /// As it was given.
        log: String,
        /// The error in the filter.
        source: tracing_subscriber::filter::ParseError,
    },
    /// There is one already.
    #[error("cannot start the log")]
    Started(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl DaemonArgs {
    /// Starts logging to standard error.
    ///
    /// # Errors
    /// If the filter does not parse, or logging was started before.
    pub fn start_log(&self) -> Result<(), LogError> {
        let filter = EnvFilter::try_new(&self.log).map_err(|source| LogError::Filter {
            log: self.log.clone(),
            source,
        })?;
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(std::io::stderr().is_terminal())
            .with_writer(std::io::stderr);
        let started = match self.log_format {
            LogFormat::Text => log.try_init(),
            LogFormat::Json => log.json().flatten_event(true).try_init(),
        };
        started.map_err(LogError::Started)
    }

    /// A client from the kubeconfig, or from the environment. It sends every request once: the code of each request
    /// decides how to handle a failure. Watches must end after [`WATCH_SECONDS`] at the latest.
    ///
    /// # Errors
    /// If there is no usable configuration.
    pub async fn client(&self) -> Result<Client, ClientError> {
        let config = match &self.kubeconfig {
            None => Config::infer().await?,
            Some(path) => {
                let error = |source| ClientError::Kubeconfig {
                    file: path.display().to_string(),
                    source,
                };
                let file = Kubeconfig::read_from(path).map_err(error)?;
                let options = KubeConfigOptions::default();
                let config = Config::from_custom_kubeconfig(file, &options).await;
                config.map_err(error)?
            }
        };
        Ok(with_patience(config, SILENCE)?)
    }
}

/// A client that gives an answer up when its next piece does not come for so long: a connection that
/// a firewall has forgotten would else be waited for until the kernel gives up.
fn with_patience(mut config: Config, silence: Duration) -> Result<Client, kube::Error> {
    config.default_retry = false;
    config.read_timeout = Some(silence);
    config.reset_reader_on_write = true;
    Client::try_from(config)
}

/// Returns at SIGTERM or SIGINT.
pub async fn stop_signal() {
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(error) => {
                tracing::error!(%error, "cannot listen for SIGTERM");
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        () = terminated => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// The value of a flag whose default is kept elsewhere, in seconds as [`seconds`] reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seconds(pub Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        seconds(text).map(Self)
    }
}

/// The value of a flag in seconds, with or without an `s`: more than 0 and at most a day.
///
/// # Errors
/// A message that describes the error in the text.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse::<f64>();
    let seconds = seconds.map_err(|_| "not a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() && seconds <= 86_400.0 => Ok(duration),
        _ => Err("must be more than 0 and at most 86400 seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt as _;
    use k8s_openapi::api::core::v1::Pod;
    use kube::api::{Api, WatchEvent, WatchParams};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    /// A watch of pods at a server that sends this and then nothing for ever: how many bookmarks came
    /// before it was given up.
    async fn watch(sent: &'static str) -> Result<usize, Box<dyn std::error::Error>> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await?;
            connection.read_u8().await?;
            connection.write_all(sent.as_bytes()).await?;
            std::future::pending::<std::io::Result<()>>().await
        });
        let client = with_patience(Config::new(url.parse()?), Duration::from_millis(300))?;
        let pods = Api::<Pod>::all(client);
        let mut bookmarks = 0;
        let ended = async {
            let mut events = std::pin::pin!(pods.watch(&WatchParams::default(), "0").await?);
            while let Some(event) = events.try_next().await? {
                assert!(matches!(event, WatchEvent::Bookmark(_)), "{event:?}");
                bookmarks += 1;
            }
            Ok::<_, kube::Error>(())
        };
        let ended = timeout(Duration::from_secs(30), ended).await?;
        assert!(ended.is_err(), "it ended by itself");
        Ok(bookmarks)
    }

    #[tokio::test]
    async fn a_watch_that_falls_silent_is_given_up() -> Result<(), Box<dyn std::error::Error>> {
        let bookmark = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\
            transfer-encoding: chunked\r\n\r\n\
            72\r\n{\"type\":\"BOOKMARK\",\"object\":{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\
            \"metadata\":{\"resourceVersion\":\"1\",\"annotations\":{}}}}\n\r\n";
        assert_eq!(watch("").await?, 0);
        assert_eq!(watch(bookmark).await?, 1);
        Ok(())
    }
}
