//! `sd-cli rpc-worker`: this machine's devices for other machines.

use crate::console::Console;
use anyhow::{Context, Result};
use clap::Parser;
use sd_options::value::whole;
use sd_runtime::{Device, DeviceKind, serve_rpc};
use std::net::IpAddr;
use std::sync::Arc;
use tracing::level_filters::LevelFilter;
use tracing::{info, warn};

/// The word that stands first on such a command line.
pub(crate) const NAME: &str = "rpc-worker";

/// Serves this machine's devices to other machines, which name it with --rpc-servers.
#[derive(Debug, Parser)]
#[command(name = "sd-rs", bin_name = "sd-cli rpc-worker", args_override_self = true, max_term_width = 120)]
pub(crate) struct Worker {
    /// Address to listen on; whoever can reach it can use the devices and read what they compute
    #[arg(long, value_name = "string", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on
    #[arg(long, value_name = "int", default_value_t = 50052, value_parser = whole(1u16, u16::MAX))]
    port: u16,
    /// Device to serve, by its name in --list-devices; may be given several times; default: all GPUs, else the processor
    #[arg(long, value_name = "string")]
    device: Vec<String>,
    /// Threads of the processor; 0 means one for each physical core
    #[arg(short, long, value_name = "int", default_value_t = 0, value_parser = whole(0usize, 4096))]
    threads: usize,
}

impl Worker {
    /// Serves until the socket fails.
    pub(crate) fn run(&self, console: &Console) -> Result<()> {
        console.log(LevelFilter::INFO, false);
        let devices = self.devices()?;
        let address = std::net::SocketAddr::from((self.host, self.port));
        if !self.host.is_loopback() {
            warn!(
                "{address}: whoever can reach it can use the devices and read prompts and pictures; nothing is encrypted"
            );
        }
        let names: Vec<&str> = devices.iter().map(|d| d.name()).collect();
        info!("serving {} at {address}, without authentication", names.join(", "));
        serve_rpc(&address.to_string(), self.threads, &devices).context(NAME)
    }

    fn devices(&self) -> Result<Vec<Arc<Device>>> {
        if !self.device.is_empty() {
            return self.device.iter().map(|name| Device::find(name).context("--device")).collect();
        }
        let mut all = Device::all();
        let is_gpu = |d: &Arc<Device>| matches!(d.kind(), DeviceKind::Gpu | DeviceKind::IntegratedGpu);
        let gpus = all.iter().any(is_gpu);
        all.retain(|d| if gpus { is_gpu(d) } else { d.kind() == DeviceKind::Cpu });
        Ok(all)
    }
}
